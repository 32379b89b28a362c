"""Proved lower bounds: no schedule is faster, no schedule as fast needs less memory (paper: section 7.3, Table 3).

Both ask `windows` whether a schedule can exist at all. Latency: the largest makespan that is excluded under the memory
cap, or what `configurations` says. Memory: suppose that every node stays below a peak v; where that excludes the
makespan, v is needed. Only multiples of an activation change what is supposed, so only they are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.bounds.configurations import configurations_bound
from rlhfuse.schedule.bounds.window_rules import SLACK
from rlhfuse.schedule.bounds.windows import Windows
from rlhfuse.schedule.ir.evaluate import TOLERANCE, tidy
from rlhfuse.schedule.ir.problem import FusionProblem, Number

MOST_AMOUNTS = 20_000  # of memory, of which all pairs are tried
_PRECISION = SLACK * 10  # relative, of a latency bound whose times have no common tick


def latency_bound(problem: FusionProblem, precision: float = 0.0) -> Number:
    """A time that no schedule of `problem` within its memory cap beats: the longest that is proved to be one, or less
    by that part of it.

    Raises InputError where the cap leaves no room for one micro-batch.
    """
    return _latency_bound(problem.without_idle_cap(), precision)


@lru_cache(maxsize=512)  # tables of layouts that differ beside training have one problem
def _latency_bound(problem: FusionProblem, precision: float) -> Number:
    windows, tick, low = _windows(problem), _tick(problem), capped_bound(problem)
    if not windows.excludes(low, disjunctions=True):
        return low
    unit = tick or low * _PRECISION
    least = 2 ** max(0, int(math.log2(max(1, precision * low / unit))))
    step = least if tick else max(least, 2**20)
    while windows.excludes(low + step * unit, disjunctions=True):
        low, step = low + step * unit, 2 * step
    while step > least:  # excluded at low, not at low + step * unit
        step //= 2
        low += step * unit * windows.excludes(low + step * unit, disjunctions=True)
    return tidy(low + unit if tick else low)


def quick_bound(problem: FusionProblem) -> Number:
    """A bound at or below `latency_bound`, by precedence and the work of each node alone. Raises InputError alike."""
    return tidy(_round_up(_windows(problem).least_makespan, _tick(problem)))


@lru_cache(maxsize=64)  # the proof of a longer one begins with it
def capped_bound(problem: FusionProblem) -> Number:
    """A bound between the two, by what a node can hold at once too. Raises InputError alike."""
    least = configurations_bound(problem, _windows(problem).least_makespan)
    return tidy(_round_up(least, _tick(problem)))


@lru_cache(maxsize=256)  # a search asks for the same ones all the time
def memory_bound(problem: FusionProblem, makespan: Number) -> Number:
    """A peak activation memory that no schedule as fast as `makespan` goes below (its fullest node's)."""
    windows = Windows.of(problem)

    def needs(peak: float, disjunctions: bool) -> bool:
        below = windows.within([peak * (1 - TOLERANCE)] * problem.nodes)
        return below is None or below.excludes(makespan, disjunctions)

    single, sums = _peaks(windows)
    proved = _last(single, lambda peak: needs(peak, disjunctions=False))
    higher = np.concatenate(([proved], sums[sums > proved]))
    reach = 1  # most often the rule for two pipelines together proves no more, so begin with small steps
    while reach < len(higher) and needs(higher[reach], disjunctions=True):
        reach *= 2
    return tidy(_last(higher[:reach], lambda peak: peak == proved or needs(peak, disjunctions=True)))


def _last(values: np.ndarray, holds: Callable[[float], bool]) -> float:
    """The last of ascending `values` for which `holds`, sought by bisection; 0 where it holds for none."""
    low, high = -1, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(values[middle]) else (low, middle)
    return values[low] if low >= 0 else 0.0


def _peaks(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Every positive amount that one stage can come to hold, and that two can, ascending; of very many only some,
    which proves less."""
    kinds = {(hold.activation, len(hold.forward)) for hold in windows.holds}
    step = -(-sum(count for _, count in kinds) // MOST_AMOUNTS)
    multiples = [activation * np.arange(1, count + 1, step) for activation, count in kinds]
    single = np.concatenate([[hold.single for hold in windows.holds], *multiples])
    pairs = [np.add.outer(a, b).ravel() for a, b in itertools.combinations_with_replacement(multiples, 2)]
    return np.unique(single[single > 0]), np.unique(np.concatenate([single, *pairs]))


@lru_cache(maxsize=64)  # likewise
def _windows(problem: FusionProblem) -> Windows:
    windows = Windows.of(problem)
    if problem.memory_cap is None:
        return windows
    room = [problem.node_cap(node) for node in range(problem.nodes)]
    capped = windows.within([cap * (1 + TOLERANCE) for cap in room])
    if capped is None:
        hold = next(hold for hold in windows.holds if hold.single > room[hold.node])
        raise InputError(
            f"node {hold.node}: the memory cap leaves {room[hold.node]:g} for activations, "
            f"but one micro-batch needs {hold.single:g}; raise memory_cap"
        )
    return capped


def _tick(problem: FusionProblem) -> int:
    """What every makespan is a multiple of when all times are whole numbers, else 0."""
    times = [problem.transfer]
    for pipeline in problem.pipelines:
        times += [*pipeline.forward, *pipeline.backward, *(pipeline.weight_gradient or ())]
    return math.gcd(*map(int, times)) if all(float(time).is_integer() for time in times) else 0


def _round_up(value: float, tick: int) -> float:
    return math.ceil(value / tick * (1 - SLACK)) * tick if tick else value
