"""The exceptions a user may meet, and how a program ends on each.

Bad input is an `InputError`: one line that names the value and the fix, exit code 2. Everything else is
a failure of the program and keeps its traceback.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
RANK_0_FIRST_SECONDS = 5.0
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
    """A reward function failed on a sample: it raised, took too long, or gave no finite number."""


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
    """End this process with `code`: exit functions run and output is flushed, but nothing is torn down.

    For processes that were in a process group: a gloo thread that frees a tensor while the interpreter is torn down
    aborts the process ("terminate called without an active exception").
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as the interpreter: waits for non-daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _print_error(text: str) -> None:
    """One write, newline included: torchrun's ranks write unbuffered to one stream, and are ended while they write."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


def run_program(
    main: Callable[[], int | None], tear_down: bool = True, prints: Callable[[str], bool] | None = None
) -> None:
    """Run `main` and leave the process with its exit code; without `tear_down`, by `leave`.

    An InputError prints `error: ...` on stderr and exits with 2. Where torchrun set RANK: from rank 0 if that meets it,
    else from one rank that does, which says so; `prints(message)` tells whether this rank is the one. A RewardError is
    the same line from whichever rank met it, exit code 1. Ctrl-C exits with 130. Any other exception propagates with
    its traceback.
    """
    try:
        code = main() or 0
    except InputError as error:
        rank, message = os.environ.get("RANK"), _one_line(error)
        first, alike = rank in (None, "0"), rank is None or isinstance(error, JointError)
        mine = first if alike or prints is None else prints(message)
        if mine:
            _print_error(message if first else f"rank {rank}: {message}")
        else:
            time.sleep(RANK_0_FIRST_SECONDS)  # torchrun ends all ranks when one has left: let rank 0 speak first
        code = EXIT_BAD_INPUT
    except RewardError as error:
        _print_error(_one_line(error))
        code = EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED
    if not tear_down:
        leave(code)
    sys.exit(code)
