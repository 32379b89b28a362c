"""What a search is after: which of two schedules is the better one, and when none can be better.

    latency                the least makespan; of equals the one of least peak memory
    memory                 the least makespan first, then the least peak memory at it
    memory, latency X      the least peak memory of the schedules no slower than X

The first stops at the latency bound, the others go on until the memory bound is met too. A memory cap
is part of the problem, so that `latency` with a cap is the fastest schedule that fits.

Knows nothing of how schedules are found. Paper: section 5.2, "among schedules with the same latency, we
prefer the ones with lower peak activation memory".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from rlhfuse.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound, memory_bound
from rlhfuse.schedule.ir.evaluate import TOLERANCE, Timeline, evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule

OBJECTIVES = ("latency", "memory")
Key = tuple[Number, Number]


class Priced(Protocol):
    """What has a makespan and a peak memory: a timeline, or a sequence of the annealers."""

    @property
    def makespan(self) -> Number: ...

    @property
    def peak_memory(self) -> Number: ...


@dataclass(frozen=True)
class Goal:
    """Raises InputError on an unknown objective, and on a `latency` with objective latency or below the bound."""

    problem: FusionProblem
    objective: str = "latency"
    latency: Number | None = None  # a makespan that is fast enough

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(f"objective={self.objective!r} must be one of {', '.join(OBJECTIVES)}")
        if self.latency is None:
            return
        if self.objective != "memory":
            raise InputError(f"latency={self.latency} goes with objective='memory'; objective is {self.objective!r}")
        if not self.latency >= self.latency_bound * (1 - TOLERANCE):
            raise InputError(f"latency={self.latency} is below the proved bound {self.latency_bound}; no schedule is")

    @cached_property
    def latency_bound(self) -> Number:
        """A makespan that no schedule of the problem beats."""
        return latency_bound(self.problem)

    @property
    def enough(self) -> Number:
        """A makespan below which being faster counts for nothing."""
        return self.latency_bound if self.latency is None else max(self.latency, self.latency_bound)

    def fast_enough(self, makespan: Number) -> bool:
        """Whether only memory is left to improve."""
        return reaches(makespan, self.enough)

    def key(self, priced: Priced) -> Key:
        """What schedules are compared by, the smaller the better: (makespan that counts, peak memory)."""
        return max(priced.makespan, self.enough), priced.peak_memory

    def memory_bound(self, makespan: Number) -> Number:
        """A peak memory that no schedule as fast as `makespan`, or as fast as is enough, goes below."""
        within = max(makespan, self.enough)
        if within not in self._proved_memory:
            self._proved_memory[within] = memory_bound(self.problem, within)
        return self._proved_memory[within]

    @cached_property
    def _proved_memory(self) -> dict[Number, Number]:
        """The memory bounds found so far, by makespan: a search asks for the same ones all the time."""
        return {}

    def reached(self, timeline: Timeline) -> bool:
        """Whether no schedule can be better in what the objective asks for."""
        if not self.fast_enough(timeline.makespan):
            return False
        return self.objective == "latency" or reaches(timeline.peak_memory, self.memory_bound(timeline.makespan))


@dataclass(frozen=True)
class Incumbent:
    """A schedule with its timeline."""

    schedule: Schedule
    timeline: Timeline

    @staticmethod
    def of(schedule: Schedule) -> Incumbent:
        return Incumbent(schedule, evaluate(schedule))

    def fits(self) -> bool:
        """Whether every node stays within its cap."""
        problem, peaks = self.schedule.problem, self.timeline.node_peak_memory
        return all(peak <= loosen(problem.node_cap(node)) for node, peak in enumerate(peaks))


def reaches(value: Number, bound: Number) -> bool:
    """Whether `value` is down at `bound`, up to the rounding of sums."""
    return value <= bound * (1 + TOLERANCE)


def loosen(cap: float) -> float:
    """A cap with room for the rounding of sums."""
    return cap * (1 + TOLERANCE) + 1e-12
