"""From a schedule of a few micro-batches to one of many: its steady state is repeated.

A unit is the smallest share of the micro-batches that keeps their proportions: M0 : M1 = 64 : 32 has 32 units of
(2, 1). What is before a break stays, the last units before it are repeated in a period of T per unit, what is after it
comes later. That gives every operation a time to aim at, and the orders follow the aims
(docs/explanation/schedule_search.md).
"""

# An element of an array is a number to numba, and may be an array to the stubs.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import reaches
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.heads_tails import new_state, refresh
from rlhfuse.schedule.search.solution import Solution

TRIED_OPERATIONS = 1_200_000  # over all breaks of one extension: a few tenths of a second
MOST_TRIES = 1_000
WINDOWS = (1, 2, 3, 4, 6, 8)  # units that are repeated together
EARLY = (0.02, 0.1)  # of the makespan: how long before its aim an operation may begin, where not in order of the aims
FEWEST_BREAKS = 8  # for every window
FEWEST_UNITS = 4
CAPPED_OPERATIONS, FEWEST_CAPPED_UNITS = 600, 5  # of the problem whose schedules are repeated under a cap
STRETCH = 0.25  # under a tight cap: the share that a period may be longer than what the bound adds for a unit


def units_of(problem: FusionProblem) -> int:
    """How many times the smallest set of micro-batches in the same proportions."""
    return math.gcd(*(pipeline.microbatches for pipeline in problem.pipelines))


def with_units(problem: FusionProblem, units: int) -> FusionProblem:
    """The problem with `units` units of micro-batches."""
    return problem.with_microbatches(problem.pipelines[0].microbatches // units_of(problem) * units)


def coarser_problem(problem: FusionProblem) -> FusionProblem | None:
    """The problem with half of the units, if from there on each unit adds the same time to the latency bound."""
    units = units_of(problem)
    half = (units + 1) // 2
    if half < FEWEST_UNITS:
        return None
    small = with_units(problem, half)
    added = latency_bound(problem) - latency_bound(small)
    exact = reaches(added, period_of(problem) * (units - half)) and reaches(period_of(problem) * (units - half), added)
    return small if exact else None


def few_units(problem: FusionProblem) -> FusionProblem | None:
    """The problem with so few units that a search under its cap is soon done; None where that saves nothing."""
    units = units_of(problem)
    few = max(FEWEST_CAPPED_UNITS, CAPPED_OPERATIONS * units // problem.tasks)
    return with_units(problem, few) if 2 * few <= units else None


def period_of(problem: FusionProblem) -> float:
    """Time per unit on the busiest node, which no schedule undercuts when units are many."""
    graph = build_graph(problem)
    return float(np.bincount(graph.node, graph.duration).max()) / units_of(problem)


class SteadyStateExtender:
    """Makes solutions of `large` from those of `small`: the same problem with fewer units."""

    def __init__(self, small: OperationGraph, dispatcher: Dispatcher, stretched: bool = False) -> None:
        """`dispatcher` is that of the large problem; periods are `stretched` where a memory cap is tight."""
        self.small, self.dispatcher = small, dispatcher
        self.graph = large = dispatcher.graph
        units = units_of(small.problem)
        self.added = units_of(large.problem) - units
        self.period = float(latency_bound(large.problem) - latency_bound(small.problem)) / self.added
        self.stretch, self.random = STRETCH if stretched else 0.0, random.Random(0)
        self.lanes = _Lanes(
            np.array([lane.first for lane in small.lanes]),
            np.array([lane.microbatches for lane in small.lanes]),
            np.array([lane.first for lane in large.lanes]),
            np.array([lane.microbatches for lane in large.lanes]),
            np.array([lane.microbatches // units for lane in small.lanes]),
        )
        self.aim = np.empty(large.size)

    @property
    def work(self) -> int:
        """Operations placed by one extension."""
        return self._count() * self.graph.size

    def _count(self) -> int:
        return max(6, min(MOST_TRIES, TRIED_OPERATIONS // self.graph.size))

    def extend(self, solution: Solution, better: Callable[[Solution], bool]) -> tuple[Solution | None, Solution]:
        """Returns the best try that is `better` (or None), and the fastest of all."""
        tries = list(self._tries(solution))
        return min(filter(better, tries), key=lambda s: s[:2], default=None), min(tries, key=lambda s: s[:2])

    def _tries(self, solution: Solution) -> Iterator[Solution]:
        """The extended schedule for every break and window, in order of the aims and a little early."""
        state = new_state(solution.sequence, 1)
        refresh(self.small.tables, state)
        tries = self._count() // (1 + len(EARLY))
        windows = WINDOWS if tries >= FEWEST_BREAKS * len(WINDOWS) else WINDOWS[:1]
        for window in windows:
            for break_at in np.linspace(0.1, 0.9, max(2, tries // len(windows))):
                period = self.period * (1 + self.stretch * self.random.random() ** 2)
                _aim(self.lanes, state.head, break_at * solution.makespan, window, self.added, period, self.aim)
                yield self.dispatcher.in_order(self.aim)
                for early in EARLY:
                    yield self.dispatcher.follow(self.aim, early * solution.makespan)


class _Lanes(NamedTuple):
    """int64 per lane: first operation and micro-batches of the small and of the large problem, those per unit."""

    first: np.ndarray
    microbatches: np.ndarray
    large_first: np.ndarray
    large_microbatches: np.ndarray
    per_unit: np.ndarray


@njit(cache=True)
def _aim(lanes: _Lanes, starts: np.ndarray, break_at: float, window: int, added: int, period: float, aim: np.ndarray):
    """Write the time that every operation of the large problem aims at."""
    for lane in range(len(lanes.first)):
        first, count = lanes.first[lane], lanes.microbatches[lane]
        before = 0
        while before < count and starts[first + before] < break_at:
            before += 1
        extra = lanes.per_unit[lane] * added
        block = lanes.per_unit[lane] * window
        for m in range(lanes.large_microbatches[lane]):
            if m < before:
                time = starts[first + m]
            elif m >= before + extra:
                time = starts[first + m - extra] + period * added
            else:
                back = (m - before) // block + 1  # windows from here to a micro-batch before the break
                forth = (before + extra - 1 - m) // block + 1  # and to one after it
                if m - back * block >= 0:
                    time = starts[first + m - back * block] + period * window * back
                elif m + forth * block - extra < count:
                    time = starts[first + m + forth * block - extra] + period * (added - window * forth)
                else:
                    time = break_at + period * (m - before + 0.5) / lanes.per_unit[lane]
            aim[lanes.large_first[lane] + m] = time
