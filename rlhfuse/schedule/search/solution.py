"""Solutions of a search, as schedules and as the annealers' arrays, and the objective that compares them.

latency                the least makespan; of equals the one of least peak memory
memory                 the least makespan first, then the least peak memory at it
memory, latency X      the least peak memory of the schedules no slower than X      (paper: section 5.2)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound, memory_bound
from rlhfuse.schedule.ir.action import Action
from rlhfuse.schedule.ir.evaluate import TOLERANCE, Timeline, evaluate, held_in_lanes, over_cap, reaches, tidy
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule

OBJECTIVES = ("latency", "memory")
Key = tuple[Number, Number]


class Solution(NamedTuple):
    """A schedule that a search has found; `sequence` as in `heads_tails.State`."""

    makespan: float
    peak_memory: float
    sequence: np.ndarray


class Round(NamedTuple):
    """What a round of moves has done; `solution` is the best one found, if that beats the best known."""

    tried: int
    solution: Solution | None
    accepted: int = 0


@dataclass(frozen=True)
class Incumbent:
    """A schedule with its timeline."""

    schedule: Schedule
    timeline: Timeline

    @staticmethod
    def of(schedule: Schedule) -> Incumbent:
        return Incumbent(schedule, evaluate(schedule))

    def fits(self) -> bool:
        """Whether every node stays within its memory cap."""
        return over_cap(self.schedule.problem, self.timeline.node_peak_memory) is None


def sequence_of(graph: OperationGraph, schedule: Schedule) -> np.ndarray:
    """int64[operations]: operation numbers node by node, in execution order; `schedule_of` is the inverse."""
    return np.array([graph.number[action] for order in schedule.orders for action in order], np.int64)


def schedule_of(graph: OperationGraph, sequence: np.ndarray) -> Schedule:
    """The schedule that a sequence stands for."""
    rows: list[list[Action]] = [[] for _ in range(graph.problem.nodes)]
    for operation in sequence.tolist():
        rows[graph.node[operation]].append(graph.actions[operation])
    return Schedule(graph.problem, tuple(tuple(row) for row in rows))


def solution_of(graph: OperationGraph, entry: Incumbent) -> Solution:
    """The incumbent in arrays."""
    timeline = entry.timeline
    return Solution(float(timeline.makespan), float(timeline.peak_memory), sequence_of(graph, entry.schedule))


def node_peaks(graph: OperationGraph, sequence: np.ndarray) -> list[Number]:
    """Peak activation memory of every node."""
    first, lane = graph.tables.first, graph.lane[sequence]
    return [tidy(held_in_lanes(graph, lane[a:b]).max(initial=0.0)) for a, b in zip(first, first[1:])]


def fits(graph: OperationGraph, solution: Solution) -> bool:
    """Whether every node stays within its memory cap."""
    return over_cap(graph.problem, node_peaks(graph, solution.sequence)) is None


@dataclass(frozen=True)
class Objective:
    """What makes one schedule better than another, and when none can be better; caps are part of the problem.

    Raises InputError on an unknown kind, and on a `latency` with kind latency or below the bound.
    """

    problem: FusionProblem
    kind: str = "latency"
    latency: Number | None = None  # a makespan that is fast enough

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise InputError(f"objective={self.kind!r} must be one of {', '.join(OBJECTIVES)}")
        if self.latency is None:
            return
        if self.kind != "memory":
            raise InputError(f"latency={self.latency} goes with objective='memory'; objective is {self.kind!r}")
        if not self.latency >= self.latency_bound * (1 - TOLERANCE):
            raise InputError(f"latency={self.latency} is below the proved bound {self.latency_bound}; no schedule is")

    @cached_property
    def latency_bound(self) -> Number:
        """A makespan that no schedule of the problem beats."""
        return latency_bound(self.problem)

    @property
    def target(self) -> Number:
        """A makespan below which being faster counts for nothing."""
        return self.latency_bound if self.latency is None else max(self.latency, self.latency_bound)

    def fast_enough(self, makespan: Number) -> bool:
        """Whether only memory is left to improve."""
        return reaches(makespan, self.target)

    def key(self, priced: Timeline | Solution) -> Key:
        """What schedules are compared by, the smaller the better: (makespan that counts, peak memory)."""
        return max(priced.makespan, self.target), priced.peak_memory

    def memory_bound(self, makespan: Number) -> Number:
        """A peak memory that no schedule as fast as `makespan`, or as the target, goes below."""
        return memory_bound(self.problem, max(makespan, self.target))

    def reached(self, timeline: Timeline) -> bool:
        """Whether no schedule can be better in what the objective asks for."""
        if not self.fast_enough(timeline.makespan):
            return False
        return self.kind == "latency" or reaches(timeline.peak_memory, self.memory_bound(timeline.makespan))
