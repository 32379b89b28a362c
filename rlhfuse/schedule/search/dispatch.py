"""The list scheduler of builders.py over arrays and in numba, to try many rules in a moment (paper: 5.2, greedy).

`tuned_starts` tries a grid of caps above 1F1B's for the largest model and for the others, forwards or backwards first,
models or directions first, and keeps what is not beaten in both makespan and peak memory. `builders.list_schedule` is
the plain twin.
"""

# An element of an array is a number to numba, and may be an array to the stubs.
# pyright: reportArgumentType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.schedule.ir.graph import Lane, OperationGraph, Tables, kinds_of
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.rules.builders import lane_ranks, pipeline_work
from rlhfuse.schedule.search.solution import Solution

TRIED_OPERATIONS = 2_000_000  # over all tries: a few tenths of a second
# Micro-batches above 1F1B's caps, in sixteenths of the pipeline's stages.
LARGEST_EXTRAS = (0, 1, 4, -1, 2, 8, 16, -2)
OTHER_EXTRAS = (8, 4, 0, 2, 12, 16, 1, -1)
KEPT = 8


class Rules(NamedTuple):
    """One way to dispatch: `rank` of every lane, the smallest goes first; `cap` of every stage, at least 1."""

    rank: np.ndarray  # int64[lanes]
    cap: np.ndarray  # int64[stages over all pipelines]


class _Lanes(NamedTuple):
    """int64 arrays. A stage of a pipeline has a number of its own; `on_node[first_on[n]:first_on[n + 1]]` are lanes."""

    first: np.ndarray
    microbatches: np.ndarray
    stage: np.ndarray
    takes: np.ndarray  # 1 where a micro-batch begins to be held, -1 where it is released, else 0
    on_node: np.ndarray
    first_on: np.ndarray


class _Scratch(NamedTuple):
    end: np.ndarray  # float64[n]
    arrival: np.ndarray  # float64[n]
    done: np.ndarray  # int64[lanes]
    held: np.ndarray  # int64[stages]
    free: np.ndarray  # float64[nodes], by the times that decide
    clock: np.ndarray  # float64[nodes], by those that the orders take
    level: np.ndarray  # float64[nodes]
    place: np.ndarray  # int64[nodes]
    heap_key: np.ndarray  # float64[4 n + nodes]
    heap_node: np.ndarray  # int64[4 n + nodes]


class Dispatcher:
    """Makes schedules of one problem."""

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        lanes, nodes, n = graph.lanes, graph.problem.nodes, graph.size
        numbers: dict[tuple[int, int], int] = {}
        stage = [numbers.setdefault((lane.pipeline, lane.stage), len(numbers)) for lane in lanes]
        self.stages = list(numbers)
        node = np.array([lane.node for lane in lanes])
        self.lanes = _Lanes(
            np.array([lane.first for lane in lanes]),
            np.array([lane.microbatches for lane in lanes]),
            np.array(stage),
            np.array([_takes(lane, graph.problem) for lane in lanes]),
            np.argsort(node, kind="stable"),
            np.concatenate([[0], np.cumsum(np.bincount(node, minlength=nodes))]),
        )
        self.scratch = _Scratch(
            np.empty(n),
            np.empty(n),
            np.empty(len(lanes), np.int64),
            np.empty(len(numbers), np.int64),
            np.empty(nodes),
            np.empty(nodes),
            np.empty(nodes),
            np.empty(nodes, np.int64),
            np.empty(4 * n + nodes),
            np.empty(4 * n + nodes, np.int64),
        )
        self._always = np.full(n, -np.inf)
        self._no_caps = np.full(len(numbers), n)

    def dispatch(self, rules: Rules) -> Solution:
        """The schedule that the rules make."""
        return self._listed(rules.rank[self.graph.lane].astype(float), self._always, rules.cap)

    def follow(self, aim: np.ndarray, early: float) -> Solution:
        """The schedule of `aim`, float64[operations]: the earliest aim first, none begun more than `early` before."""
        return self._listed(aim, aim - early, self._no_caps)

    def _listed(self, turn: np.ndarray, earliest: np.ndarray, cap: np.ndarray) -> Solution:
        sequence = np.empty(self.graph.size, np.int64)
        tables, scratch = self.graph.tables, self.scratch
        return Solution(*list_operations(tables, self.lanes, turn, earliest, cap, scratch, sequence), sequence)

    def rules(self, largest: int, others: int, forward_first: bool, model_first: bool) -> Rules:
        """1F1B's caps with so many sixteenths of the stages more; `builders.lane_ranks`."""
        pipelines = self.graph.problem.pipelines
        large = max(pipelines, key=pipeline_work).model
        extra = [math.ceil((largest if p.model == large else others) * p.stages / 16) for p in pipelines]
        caps = [max(1, pipelines[p].stages - s + extra[p]) for p, s in self.stages]
        return Rules(np.array(lane_ranks(self.graph, forward_first, model_first)), np.array(caps))


def tuned_starts(dispatcher: Dispatcher) -> list[Solution]:
    """What the grid gives, as far as nothing else is both faster and leaner; the fastest first."""
    tries = max(2, TRIED_OPERATIONS // dispatcher.graph.size)
    made = [dispatcher.dispatch(rules) for rules in _grid(dispatcher, tries)]
    kept: list[Solution] = []
    for solution in sorted(made, key=lambda solution: solution[:2]):
        if not kept or solution.peak_memory < kept[-1].peak_memory:
            kept.append(solution)
    return kept[:KEPT]


def _grid(dispatcher: Dispatcher, tries: int) -> Iterator[Rules]:
    """The most promising combinations first: both lists of extras begin with what has served best."""
    pairs = sorted(
        itertools.product(range(len(LARGEST_EXTRAS)), range(len(OTHER_EXTRAS))), key=lambda pair: (sum(pair), pair)
    )
    ways = [
        (LARGEST_EXTRAS[a], OTHER_EXTRAS[b], forward_first, model_first)
        for a, b in pairs
        for forward_first, model_first in ((True, False), (True, True), (False, True), (False, False))
    ]
    for way in ways[:tries]:
        yield dispatcher.rules(*way)


def _takes(lane: Lane, problem: FusionProblem) -> int:
    kinds = kinds_of(problem.pipelines[lane.pipeline])
    return int(lane.kind is kinds[0]) - int(lane.kind is kinds[-1])


@njit(cache=True)
def list_operations(
    t: Tables, lanes: _Lanes, turn: np.ndarray, earliest: np.ndarray, cap: np.ndarray, s: _Scratch, sequence: np.ndarray
):
    """Run the list scheduler: an idle node takes, of what may begin, the smallest `turn`; returns (makespan, peak).

    An operation may begin when its input is there, its `earliest` time has come, and a forward when its stage holds
    less than its cap. The orders run without waiting for those times: their ends are kept beside those that decide.
    """
    n, nodes = len(sequence), len(s.free)
    s.done[:] = 0
    s.held[:] = 0
    s.free[:] = 0.0
    s.clock[:] = 0.0
    s.level[:] = 0.0
    for node in range(nodes):
        s.place[node] = t.first[node]
    for o in range(n):
        s.arrival[o] = 0.0 if t.upstream[o] < 0 else np.inf
    count, makespan, peak = 0, 0.0, 0.0
    for node in range(nodes):
        count = heap_push(s.heap_key, s.heap_node, count, 0.0, node)
    while count > 0:
        now, node = s.heap_key[0], s.heap_node[0]
        count = heap_pop(s.heap_key, s.heap_node, count)
        if now < s.free[node]:
            continue
        best, chosen, wake = -1, -1, np.inf
        for k in range(lanes.first_on[node], lanes.first_on[node + 1]):
            lane = lanes.on_node[k]
            if s.done[lane] == lanes.microbatches[lane]:
                continue
            o, stage = lanes.first[lane] + s.done[lane], lanes.stage[lane]
            ready = max(s.arrival[o], earliest[o])
            if ready > now:
                wake = min(wake, ready)
            elif (best < 0 or turn[o] < turn[best]) and not (lanes.takes[lane] > 0 and s.held[stage] >= cap[stage]):
                best, chosen = o, lane
        if best < 0:
            if wake < np.inf:  # else an arrival wakes it
                count = heap_push(s.heap_key, s.heap_node, count, wake, node)
            continue
        s.done[chosen] += 1
        s.held[lanes.stage[chosen]] += lanes.takes[chosen]
        s.level[node] += t.memory[best]
        peak = max(peak, s.level[node])
        s.free[node] = now + t.duration[best]
        source = t.upstream[best]
        if source >= 0:
            s.clock[node] = max(s.clock[node], s.end[source] + t.lag[best])
        s.clock[node] = s.end[best] = s.clock[node] + t.duration[best]
        makespan = max(makespan, s.clock[node])
        sequence[s.place[node]] = best
        s.place[node] += 1
        count = heap_push(s.heap_key, s.heap_node, count, s.free[node], node)
        for k in range(2):
            target = t.downstream[best, k]
            if target >= 0:
                s.arrival[target] = s.free[node] + t.lag[target]
                count = heap_push(s.heap_key, s.heap_node, count, s.arrival[target], t.node[target])
    return makespan, peak


# A binary heap in two arrays, the smallest (key, item) first: heapq in numba takes half as long again.


@njit(cache=True)
def heap_push(keys: np.ndarray, items: np.ndarray, count: int, key: float, item: int) -> int:
    """Insert into the heap of `count` entries; returns the new count."""
    i = count
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and items[parent] <= item):
            break
        keys[i], items[i] = keys[parent], items[parent]
        i = parent
    keys[i], items[i] = key, item
    return count + 1


@njit(cache=True)
def heap_pop(keys: np.ndarray, items: np.ndarray, count: int) -> int:
    """Remove the smallest of `count` entries (read it at index 0 before); returns the new count."""
    last = count - 1
    key, item = keys[last], items[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        other = child + 1
        if other < last and (keys[other] < keys[child] or (keys[other] == keys[child] and items[other] < items[child])):
            child = other
        if keys[child] > key or (keys[child] == key and items[child] >= item):
            break
        keys[i], items[i] = keys[child], items[child]
        i = child
    keys[i], items[i] = key, item
    return last
