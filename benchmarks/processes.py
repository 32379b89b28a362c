"""The processes of a benchmark: programs that run to their end, and workers that are asked over a pipe.

A worker is an object of a class "module:Class" of this folder in a process of its own, with the Python of its own
environment. Between two requests it waits in a read; one that may be put aside is stopped, so that it takes no CPU.
This file needs the standard library alone: it is also the program of the workers, whatever their environment holds.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600.0  # of one request
END_SECONDS = 20.0  # that a launcher gets to end its ranks
POLL_SECONDS = 0.05
LOG_CHARACTERS = 4000  # shown of a process that failed
PLENTY = str(1 << 30)
ALLOCATOR = {  # glibc gives memory back to the system and faults it in again in every step unless told to keep it
    "MALLOC_MMAP_THRESHOLD_": PLENTY,
    "MALLOC_TRIM_THRESHOLD_": PLENTY,
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def environment(threads: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a process with so many threads that imports this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    counts = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    return {**os.environ, "PYTHONPATH": path, **counts, "HF_HUB_OFFLINE": "1", **(more or {})}


# programs ---------------------------------------------------------------------------------------------------------


def run(
    command: Sequence[str | Path],
    *,
    threads: int = 1,
    timeout: float = 3600.0,
    watch: Callable[[subprocess.Popen], None] = lambda _: None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end; `watch` is called every POLL_SECONDS meanwhile. Leaves no process behind.

    Raises RuntimeError with the end of what it printed when it fails or takes too long.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, env=environment(threads, more), stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
        until = time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < until:
                watch(process)
                time.sleep(POLL_SECONDS)
            late = process.poll() is None
        finally:
            end(process)
        watch(process)
        if late or process.returncode:
            output.seek(0)
            reason = f"took more than {timeout:g} s" if late else f"ended with code {process.returncode}"
            raise RuntimeError(f"{' '.join(words)} {reason}:\n{output.read()[-LOG_CHARACTERS:]}")


def end(process: subprocess.Popen) -> None:
    """Ask a launcher to end its ranks; kill what is left of its session."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended
    process.wait()


def torchrun(ranks: int, python: str = sys.executable) -> list[str]:
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def mpirun(ranks: int) -> list[str]:
    """Raises InputError where there is no mpirun for several ranks."""
    if ranks == 1:
        return []
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise InputError(f"--ranks {ranks} needs mpirun, which is not there; pip install rlhfuse[mpi] or --ranks 1")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe", "-n", str(ranks)]


def train(
    config: Path, out: Path, overrides: Sequence[str] = (), *, ranks: int = 2, timeout: float = 3600.0, **more: Any
) -> list[dict[str, Any]]:
    """Train as users do, into the folder `out`; metrics by iteration. `more`: of `run`."""
    program = [ROOT / "tools" / "train_ppo.py", "--config", config, f"trainer.output_dir={out}", *overrides]
    run([*torchrun(ranks), *program], timeout=timeout, **more)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# workers ----------------------------------------------------------------------------------------------------------


class Worker:
    """One object in a process of its own."""

    def __init__(
        self, target: str, log: Path, environment: Mapping[str, str], python: str = sys.executable, **arguments: Any
    ) -> None:
        """Begins to make `target` from `arguments`; `ready` waits for it."""
        self._target, self._log = target, log
        self._pipe, theirs = Pipe()
        words = [python, str(Path(__file__).resolve()), target, str(theirs.fileno())]
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                words,
                env={**environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this program alone
            )
        theirs.close()  # or its end would not be seen here
        self.send(arguments)

    def send(self, request: Any) -> None:
        try:
            self._pipe.send(request)
        except BrokenPipeError:
            pass  # it has ended: `receive` says with what

    def receive(self) -> Any:
        """The answer to what was sent. Raises RuntimeError with the worker's traceback or the end of its log."""
        try:
            if not self._pipe.poll(TIMEOUT_SECONDS):
                raise RuntimeError(f"{self._target} did not answer within {TIMEOUT_SECONDS:g} s")
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            code, said = self._process.wait(), self._log.read_text(errors="replace")[-LOG_CHARACTERS:]
            raise RuntimeError(f"{self._target} ended with code {code}:\n{said}") from None
        if not good:
            raise RuntimeError(f"{self._target} failed:\n{answer}")
        return answer

    ready = receive

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.send((method, arguments, named))
        return self.receive()

    def put_aside(self) -> None:
        """Stop all threads of the process and of those it started: some engines spin on after an answer."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self._pipe.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
        self._process.wait()


class ForkedWorker(Worker):
    """A worker that is this process once more: what is imported here is there already, and shared in memory."""

    def __init__(self, target: str, log: Path, environment: Mapping[str, str], **arguments: Any) -> None:
        self._target, self._log = target, log
        self._pipe, theirs = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                self._pipe.close()
                with log.open("w") as stream:
                    os.dup2(stream.fileno(), 1)
                    os.dup2(stream.fileno(), 2)
                os.environ.update(environment)
                serve(target, theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._process = Child(pid)
        self.send(arguments)


class Child:
    """A process that was forked, as `Worker` asks for one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Its code, -1 where somebody has waited before."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return -1


class Ranks:
    """Workers that form one process group of one thread each; `ask` returns the answers of all ranks."""

    def __init__(
        self, target: str, world: int, more: Mapping[str, str] | None = None, fork: bool = False, **arguments: Any
    ) -> None:
        """`arguments` make the object of each rank, which is told `rank` too. With `fork` ranks have what this process
        has imported, which must have no thread and no process group."""
        make = ForkedWorker if fork else Worker
        self._folder = tempfile.TemporaryDirectory()
        self._port = socket.socket()  # kept open, so that nobody else is given the port before rank 0 listens on it
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port.getsockname()[1])}
        own = environment(1, {**address, "WORLD_SIZE": str(world), **(more or {})})
        self._workers: list[Worker] = []
        try:
            for rank in range(world):
                log = Path(self._folder.name) / f"rank{rank}.log"
                self._workers.append(make(target, log, {**own, "RANK": str(rank)}, rank=rank, **arguments))
            for worker in self._workers:
                worker.ready()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._workers:
            worker.close()
        self._port.close()
        self._folder.cleanup()

    def ask(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        for worker in self._workers:
            worker.send((method, arguments, named))
        return [worker.receive() for worker in self._workers]


def serve(target: str, pipe: Connection) -> None:
    """The program of a worker."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a worker that is stopped sees no closed pipe
    name, _, made = target.partition(":")
    models: Any = None
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if models is None:
                models, answer = getattr(importlib.import_module(name), made)(**request), None
            else:
                method, arguments, named = request
                answer = getattr(models, method)(*arguments, **named)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2])))
