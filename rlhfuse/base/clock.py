"""The time of a process: seconds since 1970 by a clock that nobody sets, so they never jump or run backwards.

`Clock` is the time, the waits and the threads of code that runs on several ranks at once. Such code is handed one, so
that a test can run many ranks in one process under virtual time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

# Called when a piece of work is done, with its kind, when it began by `time.perf_counter`, and what was worked on;
# returns when the piece has lasted as long as it is to (monitor/pace.py).
Hold = Callable[..., None]


def unpaced(*_: object) -> None:
    """A `Hold` under which work lasts as long as it takes."""


def wall_seconds() -> float:
    """Now: the wall clock when this process first asked, and the monotonic clock from there on.

    Ranks on several machines compare by it as well as their clocks agreed then.
    """
    return _origin() + time.perf_counter()


@cache
def _origin() -> float:
    return time.time() - time.perf_counter()


class Clock:
    """The machine's time and threads. A lock may be taken again by the thread that holds it."""

    now = staticmethod(wall_seconds)
    perf_counter = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)
    Thread, Lock, Condition, Event = threading.Thread, threading.RLock, threading.Condition, threading.Event
