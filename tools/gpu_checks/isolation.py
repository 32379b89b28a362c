"""Checks in processes apart, with limits of seconds: a hang or a crash is one check's result.

Small checks share a process, since each start of CUDA takes seconds, and what fails there is tried again alone.
Processes are forked from one that has imported everything and has not touched the GPU; where an import has touched
it, they are started anew.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfuse.base.cuda_environment import LOADING

MEMORY_DEVICE = "/dev/nvidia-uvm"  # CUDA holds it from its start on; who asks the driver alone opens others
TOLD_BYTES = 1500  # of what a check that gave no answer has said last


@dataclass(frozen=True)
class Check:
    """A function `module:function` of this folder with its arguments. `seconds`: what it takes on a GPU, about."""

    name: str
    function: str
    arguments: dict[str, Any]
    seconds: float
    limit: float
    gpus: int = 1  # that it needs
    rehearsed: bool = True  # on a CPU too; the tests interpret what is left out there
    small: bool = False  # may share its process with others
    background: bool = False  # runs from the beginning on, beside the others: it compiles
    eager: bool = False  # kernels are loaded as in a run; else when they are first launched, which starts sooner


@dataclass(frozen=True)
class Result:
    """One check's outcome; `detail` holds what was measured, or the error."""

    name: str
    ok: bool
    seconds: float
    detail: Any


@dataclass(frozen=True)
class Surroundings:
    """What the processes of a call have in common."""

    kind: str  # "cuda" or "cpu"
    folder: Path
    references: Path | None
    context: Any  # of multiprocessing


def starts_with() -> Any:
    """The context that processes are started with; imports what checks need once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpu_checks.imports"])
    process = context.Process(target=_leave_if_touched)
    process.start()
    process.join()
    return context if process.exitcode == 0 else multiprocessing.get_context("spawn")


class Worker:
    """A process that runs one check after the other, in a process group of its own."""

    def __init__(self, place: Surroundings) -> None:
        self._place = place
        self._pipe, theirs = place.context.Pipe()
        self._process = place.context.Process(target=_serve, args=(theirs, place.kind, place.references))
        self._process.start()
        theirs.close()

    def begin(self, check: Check, limit: float) -> None:
        """Let it run; its files stay in a folder of its name, a second time of `NAME.alone`."""
        own = self._place.folder / check.name
        own = own.with_name(f"{check.name}.alone") if own.exists() else own
        own.mkdir(parents=True)
        self._check, self._log, self._start, self._limit = check, own / "log.txt", time.monotonic(), limit
        self._pipe.send((check, own, self._log, limit))

    def result(self) -> Result:
        """Wait for the check that was begun, as long as it may take. A worker that gave no answer has ended."""
        left = max(self._start + self._limit - time.monotonic(), 0.1)
        multiprocessing.connection.wait([self._pipe, self._process.sentinel], left)
        try:
            if self._pipe.poll():
                return Result(self._check.name, *json.loads(self._pipe.recv()))
        except (EOFError, ConnectionError):
            pass
        self._process.join(1)  # one that crashed has closed its pipe before its end can be seen
        hung, seconds = self._process.is_alive(), round(time.monotonic() - self._start, 3)
        self.close()
        ended = f"ended by {_cause(self._process.exitcode)} without an answer"
        why = f"no answer within {self._limit:.0f} s" if hung else ended
        return Result(self._check.name, False, seconds, f"{why}; its last words: {_last_words(self._log)}")

    def close(self) -> None:
        """End it and all that it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to make its own group, or is gone
            self._process.kill()
        self._process.join(10)


def _serve(pipe: Any, kind: str, references: Path | None) -> None:
    """In the worker: run checks as they come."""
    os.setsid()  # what it starts is ended with it
    import gpu_checks.imports  # noqa: F401  # where it was not forked with them

    gc.freeze()  # garbage of the process that this one was forked from is not collected here: its threads are not here
    while True:
        try:
            check, own, log, limit = pipe.recv()
        except EOFError:  # the program is gone
            os._exit(0)
        stream = open(log, "ab")
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
        faulthandler.enable(stream)
        faulthandler.dump_traceback_later(max(limit - 3, limit / 2, 0.1), file=stream)  # says where it hangs
        if check.background:
            os.nice(10)
            os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 2) // 2)))  # of a compilation
        if not check.eager:
            os.environ.setdefault(LOADING, "LAZY")
        pipe.send(json.dumps(_run(check, kind, own, references)))
        faulthandler.cancel_dump_traceback_later()


def _run(check: Check, kind: str, own: Path, references: Path | None) -> tuple[bool, float, Any]:
    from gpu_checks.bench import Bench, References

    start = time.monotonic()
    try:
        module, _, function = check.function.partition(":")
        run, bench = (
            getattr(importlib.import_module(f"gpu_checks.{module}"), function),
            Bench(kind, own, References(references)),
        )
        ok, detail = True, json.loads(json.dumps(run(bench, **check.arguments)))
        if check.small:
            gc.collect()
            bench.device.empty_cache()
    except Exception as error:  # recorded, so that the other checks still run
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        ok, detail = False, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    sys.stdout.flush()
    return ok, round(time.monotonic() - start, 3), detail


def _last_words(log: Path) -> str:
    """The end of what was said, but the beginning of a stack, where its innermost calls are."""
    said = log.read_text(errors="replace") if log.is_file() else ""
    stack = max(said.rfind("Timeout ("), said.rfind("Fatal Python error"))
    return said[-TOLD_BYTES:] if stack < 0 else said[max(stack - TOLD_BYTES // 3, 0) : stack + TOLD_BYTES]


def _cause(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _leave_if_touched() -> None:
    """Exit code 1 where the process that this one was forked from has started CUDA, which its forks cannot use."""
    held = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    os._exit(any(path.startswith(MEMORY_DEVICE) for path in held))
