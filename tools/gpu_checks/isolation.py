"""Each check in a process of its own, with a limit of seconds: a hang or a crash is one check's result.

Processes are forked from one that has imported everything and has not touched the GPU; where an import has touched
it, they are started anew.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLD_BYTES = 1500  # of what a check that gave no answer has said last


@dataclass(frozen=True)
class Check:
    """A function `module:function` of this folder with its arguments. `seconds`: what it takes on a GPU, about."""

    name: str
    function: str
    arguments: dict[str, Any]
    seconds: float
    limit: float
    rehearsed: bool = True  # on a CPU too; the tests interpret what is left out there


@dataclass(frozen=True)
class Result:
    """One check's outcome; `detail` holds what was measured, or the error."""

    name: str
    ok: bool
    seconds: float
    detail: Any


def starts_with() -> Any:
    """The context that processes are started with; imports what checks need once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpu_checks.imports"])
    process = context.Process(target=_leave_if_touched)
    process.start()
    process.join()
    return context if process.exitcode == 0 else multiprocessing.get_context("spawn")


def run_isolated(check: Check, kind: str, folder: Path, references: Path | None, context: Any, limit: float) -> Result:
    """The result of a check that is given `limit` seconds; its files stay in `folder`/NAME."""
    own = folder / check.name
    own.mkdir(parents=True)
    answer, log = own / "answer.json", own / "log.txt"
    arguments = (check, kind, own, references, answer, log, limit)
    start = time.monotonic()
    process = context.Process(target=_answer, args=arguments)
    process.start()
    process.join(limit)
    if hung := process.is_alive():
        _end(process)
    seconds = round(time.monotonic() - start, 3)
    if answer.is_file():
        ok, detail = json.loads(answer.read_text()).values()
    else:
        why = f"no answer within {limit:.0f} s" if hung else f"ended by {_cause(process.exitcode)} without an answer"
        ok, detail = False, f"{why}; its last words: {_last_words(log)}"
    return Result(check.name, ok, seconds, detail)


def _answer(check: Check, kind: str, own: Path, references: Path | None, answer: Path, log: Path, limit: float) -> None:
    """In the process of its own: run the check and write what came of it."""
    os.setsid()  # what it starts is ended with it
    stream = open(log, "ab")
    for number in (1, 2):
        os.dup2(stream.fileno(), number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    faulthandler.enable(stream)
    faulthandler.dump_traceback_later(max(limit - 3, limit / 2), file=stream)  # says where it hangs
    from gpu_checks.bench import Bench
    from gpu_checks.references import References

    from rlhfuse.base.files import write_json

    try:
        module, _, function = check.function.partition(":")
        run = getattr(importlib.import_module(f"gpu_checks.{module}"), function)
        ok, detail = True, run(Bench(kind, own, References(references)), **check.arguments)
    except Exception as error:  # recorded, so that the other checks still run
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        ok, detail = False, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    write_json(answer, {"ok": ok, "detail": detail})
    sys.stdout.flush()
    os._exit(0)  # what is left of a device or a process group is not waited for


def _last_words(log: Path) -> str:
    """The end of what was said, but the beginning of a stack, where its innermost calls are."""
    said = log.read_text(errors="replace") if log.is_file() else ""
    stack = max(said.rfind("Timeout ("), said.rfind("Fatal Python error"))
    return said[-TOLD_BYTES:] if stack < 0 else said[max(stack - TOLD_BYTES // 3, 0) : stack + TOLD_BYTES]


def _end(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to make its own group
        process.kill()
    process.join(10)


def _cause(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _leave_if_touched() -> None:
    """Exit code 1 where the process that this one was forked from holds the GPU, and its forks cannot."""
    held = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    os._exit(any(path.startswith("/dev/nvidia") for path in held))
