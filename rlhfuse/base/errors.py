"""The exceptions a user may meet, and how a program ends on each.

Bad input is an `InputError`: one line that names the value and the fix, exit code 2. Everything else is
a failure of the program and keeps its traceback.
"""

from __future__ import annotations

import atexit
import errno
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
MOST_CHARACTERS = 4000  # of a message: it may quote a value of any length
RANK_0_FIRST_SECONDS = 5.0
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


class _LastingOutput(io.FileIO):
    """A descriptor for output. When its reader has left, what is written is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _outlast_readers() -> None:
    """Let the program go on after `| head`, or when Ctrl-C has ended a `tee`, to the end of what it does."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):  # None: closed; another: a test's
            raw = _LastingOutput(stream.fileno(), "w", closefd=False)
            layer: Any = raw if stream.write_through else io.BufferedWriter(raw)
            how = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(layer, **how))


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


def _one_line(error: BaseException) -> str:
    """The message, without its middle where it is long: the value is at the beginning, the fix at the end."""
    text = " ".join(str(error).split())
    if (beyond := len(text) - MOST_CHARACTERS) <= 0:
        return text
    return f"{text[: MOST_CHARACTERS // 2]} ... ({beyond} characters) ... {text[-MOST_CHARACTERS // 2 :]}"


def _print_line(text: str) -> None:
    """One write, newline included: torchrun's ranks write unbuffered to one stream, and are ended while they write."""
    if sys.stderr:  # None where it was closed at the start
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _print_error(told: str, rank: str | None, trace: str = "") -> None:
    """The traceback, if any, and the line; without the line where the launcher ends the screen with it."""
    if LAST_WORD not in os.environ or rank is None:
        _print_line(trace + told)
    elif trace:
        _print_line(trace.rstrip())


def run_program(
    main: Callable[[], int | None], tear_down: bool = True, prints: Callable[[str, float], bool] | None = None
) -> None:
    """Run `main` and leave the process with its exit code; without `tear_down`, or where threads are left, by `leave`.

    An InputError prints `error: ...` on stderr and exits with 2. Of a program with `prints`, where RANK is set, from
    rank 0 if that meets it, else from one rank that does, which says so; `prints(what, seconds)` tells whether this
    rank is the one, after waiting so long for rank 0. A RewardError, a number that is not finite, and on a rank every
    other exception, is such a line as well, from whichever rank is first, exit code 1; what is no error of the user's
    has its traceback before it. Every rank leaves its line for torchrun's table. Ctrl-C exits with 130.
    """
    before = threading.enumerate()
    os.environ[STARTED_BY] = f"{os.environ.get(STARTED_BY, '')}/{os.getpid()}-{time.time_ns()}"
    _outlast_readers()
    try:
        code = main() or 0
    except InputError as error:
        rank = os.environ.get("RANK") if prints else None  # asked here: who starts ranks unsets it
        first, alike = rank in (None, "0"), rank is None or isinstance(error, JointError)
        message = _one_line(error)
        told = f"error: {message if first or alike else f'rank {rank}: {message}'}"
        leave_message(told)
        if first if alike or prints is None else prints(message, RANK_0_FIRST_SECONDS):
            _print_error(told, rank)
        else:
            time.sleep(RANK_0_FIRST_SECONDS)  # torchrun ends all ranks when one has left: let rank 0 speak first
        code = EXIT_BAD_INPUT
    except (Stopped, KeyboardInterrupt) as error:
        told = _one_line(error) or "interrupted"
        leave_message(told)
        if not prints or os.environ.get("RANK", "0") == "0":
            _print_line(told)
        code = EXIT_INTERRUPTED
    except Exception as error:
        rank = os.environ.get("RANK") if prints else None
        expected = isinstance(error, RewardError | FloatingPointError)
        if rank is None and not expected and tear_down:
            raise
        told = f"error: {'' if expected else f'rank {rank or 0}: {type(error).__name__}: '}{_one_line(error)}"
        leave_message(told)
        if rank is None or prints is None or prints("failure", 0.0):
            _print_error(told, rank, "" if expected else traceback.format_exc())
        code = EXIT_FAILED
    if not tear_down or any(not thread.daemon for thread in threading.enumerate() if thread not in before):
        leave(code)
    sys.exit(code)
