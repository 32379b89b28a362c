"""How a program ends on each exception, and which rank prints an error that others may meet as well."""

from __future__ import annotations

import datetime
import io
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlhfuse.base import errors
from rlhfuse.base.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    LAST_WORD,
    STARTED_BY,
    InputError,
    JointError,
    RewardError,
    Stopped,
    leave_message,
)

MOST_CHARACTERS = 4000  # of a message: it may quote a value of any length
RANK_0_FIRST_SECONDS = 5.0
STORE_PATIENCE = datetime.timedelta(seconds=10)


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
        errors.leave(code)
    sys.exit(code)


def prints_error(what: str, seconds: float) -> bool:
    """Whether this rank, under torchrun, is to print of `what`: rank 0 if it meets it, else whoever asks first.

    The ranks ask the launcher's store, which is there before any process group; others wait so many seconds for rank
    0. True where there is no store.
    """
    from torch.distributed import TCPStore  # loads only once there is an error  # pyright: ignore[reportPrivateImportUsage]  # torch's __all__ lacks it

    key = f"error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{what}"
    until = time.monotonic() + (0.0 if os.environ["RANK"] == "0" else seconds)
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # first: for a name that nobody knows the store waits
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=STORE_PATIENCE)
        while time.monotonic() < until:
            if store.check([key]):
                return False
            time.sleep(0.05)
        return store.add(key, 1) == 1
    except (KeyError, ValueError, OSError, RuntimeError):
        return True


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
