"""Work that may take no more than a part of the time: it is due again once that much time has passed.

Simulating R_t or writing trace.json costs the same for a short iteration as for a long one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhfuse.base.clock import Clock


class TimeBudget:
    """`share`: the part of the time that the work may take, in (0, 1]. Due at first."""

    def __init__(self, share: float, clock: Clock = Clock()) -> None:
        self._share, self._clock, self._next = share, clock, clock.now()

    def due(self) -> bool:
        return self._clock.now() >= self._next

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Around the work, which may be done before it is due: that puts it off, too."""
        work = self._clock.begin()
        try:
            yield
        finally:
            self._next = work.start + work.seconds / self._share
