"""The exceptions a user may meet, and how a process ends.

Bad input is an `InputError`: one line that names the value and the fix, exit code 2. Everything else is
a failure of the program and keeps its traceback.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# torchrun shows the message of the earliest error last; a rank that was killed leaves none, and counts as having ended
# when torchrun noticed, so the words of those who saw it are dated before
BEFORE_NOTICED_SECONDS = 10
LAST_WORD = "RLHFUSE_LAST_WORD"  # set for ranks whose launcher prints, last of all, the line that a rank leaves
EXIT_SECONDS = 10.0  # for exit functions, of which a user's file may have registered one that never returns
STARTED_BY = "RLHFUSE_STARTED_BY"  # marks what a program starts, and what that starts, whoever is its parent later
SERVICES = (b"multiprocessing.resource_tracker", b"wandb-core")  # end by themselves when they have done their work
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota used up, above the limit of a file's size


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line: the value and the fix."""


class JointError(InputError):
    """An InputError that every rank of the job raises at the same place, so that none is left waiting for another."""


class ScheduleError(InputError):
    """A schedule that does not belong to its problem or breaks a rule; `grid` shows where, if known."""

    def __init__(self, message: str, grid: str = "") -> None:
        super().__init__(message)
        self.grid = grid


class RewardError(RuntimeError):
    """A reward function failed on a sample: it raised, took too long, or gave no finite number. Or the machine kept
    failing under a call of it, or of a tool."""


class NotFiniteError(FloatingPointError):
    """A loss, gradient or score that is not finite, which every rank of the job raises at the same place."""


class Stopped(Exception):
    """A signal asked the run to stop, and all ranks leave at the same place; the message says how to go on."""


@contextmanager
def writing(path: str | Path, otherwise: str = "make it writable") -> Iterator[None]:
    """Turns an OSError of a block that writes `path` into an InputError with the file, the error and the fix.

    `otherwise`: the fix when the reason is not that there is no room.
    """
    try:
        yield
    except OSError as error:
        fix = "free space there" if error.errno in NO_ROOM else otherwise
        raise InputError(f"cannot write {path}: {error.strerror or error}; {fix}") from None


def leave(code: int) -> NoReturn:
    """End this process with `code`: exit functions run and output is flushed, but nothing is torn down or waited for.

    Torn down, a gloo thread that frees a tensor aborts the process; waited for, a thread of a user's file may not end.
    """
    end_started(os.getpid())  # of some an exit function waits for the end
    threading.Thread(target=lambda: time.sleep(EXIT_SECONDS) or _leave_now(code), daemon=True).start()
    atexit._run_exitfuncs()
    _leave_now(code)


def _leave_now(code: int) -> NoReturn:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(BrokenPipeError, ValueError):  # which a user's file may have closed
            stream.flush()
    mark = os.environ.get(STARTED_BY, "")
    end_started(os.getpid(), mark.encode() if f"/{os.getpid()}-" in mark else None)
    os._exit(code)


def end_started(process: int, mark: bytes | None = None) -> None:
    """End what `process`, which lives, has started, and what that has, in whatever session; and who has the mark."""
    parents, started = {}, [process]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended, or is another user's
            parents[pid := int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            if mark and mark in stat.with_name("environ").read_bytes():
                started.append(pid)
    for each in started:
        started += [pid for pid, parent in parents.items() if parent == each and pid not in started]
    for pid in {*started[1:]} - {os.getpid()}:
        with suppress(OSError):
            if not any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in SERVICES):
                os.kill(pid, signal.SIGKILL)


def say_at_once(text: str) -> None:
    """Write a line to stderr from any thread: the main thread may be blocked while it holds the lock of sys.stderr."""
    with suppress(OSError):  # nobody reads it
        os.write(2, f"{text}\n".encode())


def leave_message(text: str) -> bool:
    """Leave `text` where torchrun's table of failures, and whoever started it, finds it; False without torchrun."""
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False
    when = str(int(time.time()) - BEFORE_NOTICED_SECONDS)
    with suppress(OSError):  # the error counts, not that it could not be told
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": when}}}))
        return True
    return False
