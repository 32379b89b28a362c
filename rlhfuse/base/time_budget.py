"""Work that may take no more than a part of the time: it is due again once that much time has passed.

Simulating R_t or writing trace.json costs the same for a short iteration as for a long one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeBudget:
    """`share`: the part of the time that the work may take, in (0, 1]. Due at first."""

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share, self._clock = share, clock
        self._next = clock()

    def due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Around the work, which may be done before it is due: that puts it off, too."""
        begin = self._clock()
        try:
            yield
        finally:
            self._next = begin + (self._clock() - begin) / self._share
