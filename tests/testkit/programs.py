"""Programs of this checkout, started as a user starts them or called in this process; ranks killed at a moment.

The fixture `programs` gives the one `Programs`; a test that has it is one of programs, and no other may start one.
"""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from program import run_program

from testkit.paths import ROOT, TESTS
from testkit.workers import forkserver, host_store

TIMEOUT_SECONDS = 540  # a hang; a machine with other work needs minutes for the first start, which compiles
OF_A_JOB = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "tools", TESTS)))
KILLED = TESTS / "testkit" / "killed_training.py"
MPIRUN = Path(sys.executable).with_name("mpirun")


def environment(**variables: str) -> dict[str, str]:
    """That of a user's shell: one thread, no job around it."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")} if os.geteuid() == 0 else {}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, **root, **variables}


def call_tool(name: str, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `python tools/NAME.py WORDS` would do, in this process: its exit code and what it said."""
    return call_main(importlib.import_module(f"tools.{name}"), *words, **variables)


def call_main(module: Any, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the program of the module would do, in this process; lines are as wide on every terminal.

    What it changes for the process is given back: environment, threads, filters of warnings.
    """
    out, err, code, threads = io.StringIO(), io.StringIO(), 0, torch.get_num_threads()
    arguments = [f"{module.__name__.replace('.', '/')}.py", *map(str, words)]
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, environment(**{"COLUMNS": "160", **variables}), clear=True),
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("rlhfuse.base.errors.leave", sys.exit),  # the process is the tests'
    ):
        try:
            run_program(module.main)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        finally:
            torch.set_num_threads(threads)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


class Programs:
    """Starts programs; whatever a test leaves running is ended with it."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: object, cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
        """In a session of its own, both outputs in one."""
        process = subprocess.Popen(
            [*map(str, words)],
            cwd=cwd,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(
        self, *words: object, cwd: Path = ROOT, timeout: float = TIMEOUT_SECONDS, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Wait for it. Raises subprocess.TimeoutExpired."""
        command = [*map(str, words)]
        return subprocess.run(
            command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=timeout
        )

    def python(self, *words: object, **more) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, *words, **more)

    def tool(self, name: str, *words: object, **more) -> subprocess.CompletedProcess[str]:
        return self.python(ROOT / "tools" / f"{name}.py", *words, **more)

    def mpirun(self, ranks: int, *words: object, **more) -> subprocess.CompletedProcess[str]:
        return self.run(MPIRUN, "--oversubscribe", "-n", ranks, sys.executable, *words, **more)

    def train(
        self, config: Path, *overrides: str, ranks: int = 2, programs: tuple[Path, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """Start the training program under torchrun; `programs` stand before or instead of it."""
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        program = programs or (ROOT / "tools" / "train_ppo.py",)
        return self.start(*torchrun, *program, "--config", config, *overrides, **variables)

    def trained(self, config: Path, *overrides: str, ranks: int = 2, **variables: str) -> str:
        """What a whole run said, which must end well."""
        return finish(self.train(config, *overrides, ranks=ranks, **variables))

    def end_all(self) -> None:
        """End what still runs: the ranks follow their launcher."""
        while self._started:
            if (process := self._started.pop()).poll() is None:
                end(process)


def end(process: subprocess.Popen[str]) -> None:
    tree = [*psutil.Process(process.pid).children(recursive=True), process]
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def ended(process: subprocess.Popen[str], timeout: float = TIMEOUT_SECONDS) -> str:
    """What the program said, once it has ended; one that takes too long is ended with its ranks."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        end(process)
        raise


def finish(process: subprocess.Popen[str]) -> str:
    out = ended(process)
    assert process.returncode == 0, out
    return out


def eventually(enough: Callable[[], object], otherwise: object = "it never came to that") -> None:
    """Wait until `enough()` is true; fails with `otherwise`, or what that returns, when only a hang explains it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not enough():
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.02)


def killed_in(out: str) -> str:
    """In what testkit/killed_training.py was killed."""
    found = re.search(r"killed in: (.*)", out)
    assert found, out
    return found[1]


def killed_forked(config: Path, moment: str, log: Path, *overrides: str, ranks: int = 2) -> str:
    """A run that ends by SIGKILL at the moment. Returns in what it was killed."""
    codes, out = forked(config, moment, log, *overrides, ranks=ranks)
    assert all(codes), out
    return killed_in(out)


def forked(config: Path, moment: str, log: Path, *overrides: str, ranks: int = 2) -> tuple[list[int | None], str]:
    """A run in which something happens at the moment (testkit/killed_training.py). Returns exit codes, what was said.

    Without torchrun: its ranks are forked from a process that has loaded all modules, which takes longer than a short
    run, and find each other through a store of this process. What they say goes to `log`.
    """
    store = host_store()  # as torchrun's agent: its port is bound when it is chosen
    os.environ["PYTHONPATH"] = PATHS  # for the process that loads modules
    context = forkserver()
    processes = []
    for rank in range(ranks):
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "WORLD_SIZE": ranks,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "KILL_AT": moment,
        }
        arguments = ["--config", str(config), *overrides]
        processes.append(context.Process(target=run_rank, args=(variables, arguments, log)))
        processes[-1].start()
    for process in processes:
        process.join(TIMEOUT_SECONDS)
        process.kill()
        process.join()
    return [process.exitcode for process in processes], log.read_text()


def run_rank(variables: dict, arguments: list[str], log: Path) -> None:
    """The program of a forked rank."""
    from testkit import killed_training

    with open(log, "ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update({name: str(value) for name, value in variables.items()}, OMP_NUM_THREADS="1")
    sys.argv = ["killed_training.py", *arguments]
    killed_training.run_program(killed_training.main, prints=killed_training.prints_error)


def ranks_of(launcher: int) -> dict[int, int]:
    """RANK -> pid of the processes that a launcher has started and that live."""
    found = {}
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.Error):
            if (rank := child.environ().get("RANK")) is not None and child.status() != psutil.STATUS_ZOMBIE:
                found[int(rank)] = child.pid
    return found


def left_of(folder: Path) -> list[str]:
    """Command lines of processes that a run has left behind in this folder."""
    found = []
    for one in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(one.info["cmdline"] or ())
        if re.search(rf"output_dir={folder}\b", words) and one.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found
