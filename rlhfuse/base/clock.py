"""Seconds since 1970 by a clock that nobody sets: what is measured by it never jumps and never runs backwards."""

from __future__ import annotations

import time
from functools import cache


def wall_seconds() -> float:
    """Now: the wall clock when this process first asked, and the monotonic clock from there on.

    Ranks on several machines compare by it as well as their clocks agreed then.
    """
    return _origin() + time.perf_counter()


@cache
def _origin() -> float:
    return time.time() - time.perf_counter()
