"""One rank's time, waits and threads, and the record of its work.

Code that runs on several ranks at once is handed a `Clock`, so that a test can run many ranks in one process under
virtual time, and a paced run can make work last longer (monitor/pace.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlhfuse.base.errors import InputError

GROUPS = ("predicted", "measured")
_ORIGIN = time.time() - time.perf_counter()


@dataclass(frozen=True)
class Span:
    """One piece of work of a trace; `args` are facts shown when it is clicked, of JSON types."""

    name: str
    kind: str  # generate, migrate, score, reshard, actor F, critic B ...
    rank: int
    start_seconds: float
    end_seconds: float
    group: str = "measured"
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise InputError(f"span {self.name}: group {self.group!r} is not one of {', '.join(GROUPS)}")
        if self.end_seconds < self.start_seconds:
            raise InputError(f"span {self.name}: ends at {self.end_seconds} s, before {self.start_seconds} s")


class Piece:
    """A piece of work that begins now. `start` and `end` are in seconds of its clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.start = clock, clock.now()
        self.end = math.inf  # that is, under way
        self.waited = 0.0  # seconds that are not its own

    @property
    def seconds(self) -> float:
        """Its own seconds so far, or until its end."""
        return min(self._clock.now(), self.end) - self.start - self.waited

    def finish(self) -> None:
        """It ends now, unless it is finished again."""
        self.end = self._clock.now()


class Clock:
    """The machine's time and threads. A lock may be taken again by the thread that holds it.

    `seconds_of` (kinds of work), `spans` and `observed` (rows by kind) are this rank's since the last `forget`.
    """

    Thread, Lock, Condition, Event = threading.Thread, threading.RLock, threading.Condition, threading.Event

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.forget()

    def forget(self) -> None:
        """Begin the record anew."""
        self.seconds_of: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.observed: dict[str, list[list]] = defaultdict(list)

    def now(self) -> float:
        """Seconds since 1970, by a clock that nobody sets: they never jump or run backwards.

        Ranks on several machines compare by them as well as the machines' clocks agreed when the processes began.
        """
        return _ORIGIN + time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def begin(self) -> Piece:
        """A piece of work that whoever asks for it ends."""
        return Piece(self)

    @contextmanager
    def work(self, kind: str = "", price: Sequence[Any] = (), span: bool = True, **args: Any) -> Iterator[Piece]:
        """Times the block, unless it raises.

        `kind`: what the record calls it, if it is to be recorded; `span`: whether the trace shows it, with `args`.
        `price`: kind and counts of work that in a paced run lasts as long as that is priced.
        """
        piece = Piece(self)
        yield piece
        if price:
            self.hold(piece.start, *price)
        if piece.end == math.inf:
            piece.finish()
        if kind:
            self.seconds_of[kind] += piece.seconds
        if kind and span:
            self.span(kind, piece.start, piece.end, **args)

    def span(self, kind: str, start: float, end: float | None = None, **args: Any) -> None:
        """Show in the trace what lasted until `end`, or now."""
        if (end := self.now() if end is None else end) > start:
            self.spans.append(Span(kind, kind, self.rank, start, end, args=args))

    def observe(self, kind: str, *row: float) -> None:
        """Note a row for the costs that are measured (`RankEvents`)."""
        self.observed[kind].append(list(row))

    def take_observed(self) -> dict[str, list[list]]:
        """The rows since the last time."""
        rows, self.observed = dict(self.observed), defaultdict(list)
        return rows

    def hold(self, start: float, kind: str, *counts: Any) -> None:
        """Return when work that began at `start` has lasted as long as it is to: at once, unless it is paced."""
