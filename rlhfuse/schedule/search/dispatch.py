"""The list scheduler of builders.py over arrays and in numba, to try many rules in a moment (paper: 5.2, greedy).

Where nodes have memory caps, it begins nothing after which what is in flight could not drain (draining.py): so every
schedule that it makes fits. `tuned_starts` tries a grid of 1F1B's windows and wider or narrower ones, forwards or
backwards first, models or directions first, and keeps what is not beaten in both makespan and peak memory.
`builders.list_schedule` is the plain twin.
"""

# An element of an array is a number to numba, and may be an array to the stubs.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import Lane, OperationGraph, Tables, kinds_of
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.rules.builders import lane_ranks, pipeline_work
from rlhfuse.schedule.search.draining import IN_PLACE, Drain, Stages, can_drain, new_drain, stages_of
from rlhfuse.schedule.search.solution import Solution

TRIED_OPERATIONS = 2_000_000  # over all tries: a few tenths of a second
# Micro-batches above 1F1B's caps, in sixteenths of the pipeline's stages.
LARGEST_EXTRAS = (0, 1, 4, -1, 2, 8, 16, -2)
OTHER_EXTRAS = (8, 4, 0, 2, 12, 16, 1, -1)
KEPT = 8


class Rules(NamedTuple):
    """One way to dispatch; what is `reserved` has room for its windows before others admit a micro-batch."""

    turn: np.ndarray  # float64[operations], the smallest goes first
    earliest: np.ndarray  # float64[operations], when it may begin
    window: np.ndarray  # int64[stages], most micro-batches in flight, at least 1
    reserved: np.ndarray  # bool[stages], alike over a pipeline
    patience: float = 0.0  # a node waits for an earlier turn that comes within this part of the chosen one's time


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
    refused: np.ndarray  # int64[lanes], at which stamp of its node a lane had no room
    barred: np.ndarray  # int64[lanes], 1 where it could not drain, and its node has had room for it ever since
    held: np.ndarray  # int64[stages]
    free: np.ndarray  # float64[nodes], by the times that decide
    clock: np.ndarray  # float64[nodes], by those that the orders take
    level: np.ndarray  # float64[nodes]
    left: np.ndarray  # float64[nodes], time of what has not begun
    place: np.ndarray  # int64[nodes]
    blocked: np.ndarray  # int64[nodes], an operation that was refused since the node last ran one, or -1
    heap_key: np.ndarray  # float64[2 n + nodes]
    heap_item: np.ndarray  # int64[2 n + nodes]


class Dispatcher:
    """Makes schedules of one problem, within its memory caps unless `capped` is False."""

    def __init__(self, graph: OperationGraph, capped: bool = True) -> None:
        self.graph = graph
        lanes, nodes, n = graph.lanes, graph.problem.nodes, graph.size
        self.stages = stages_of(graph)
        node = np.array([lane.node for lane in lanes])
        self.lanes = _Lanes(
            np.array([lane.first for lane in lanes]),
            np.array([lane.microbatches for lane in lanes]),
            np.array([self.stages.first[lane.pipeline] + lane.stage for lane in lanes]),
            np.array([_takes(lane, graph.problem) for lane in lanes]),
            np.argsort(node, kind="stable"),
            np.concatenate([[0], np.cumsum(np.bincount(node, minlength=nodes))]),
        )
        self.caps = np.array([loosen(graph.problem.node_cap(node)) if capped else math.inf for node in range(nodes)])
        self.capped = bool(np.isfinite(self.caps).any())  # whether any node has a cap
        self.any_time, self.any_window = np.zeros(n), np.full(len(self.stages.node), n)
        self.unreserved = np.zeros(len(self.stages.node), np.bool_)
        scratch = (
            *np.empty((2, n)),
            *np.empty((3, len(lanes)), np.int64),
            np.empty(len(self.stages.node), np.int64),
            *np.empty((4, nodes)),
            *np.empty((2, nodes), np.int64),
            np.empty(2 * n + nodes),
            np.empty(2 * n + nodes, np.int64),
        )
        self._scratch = _Scratch(*scratch)
        self._drain = new_drain(graph)

    def dispatch(self, rules: Rules, limit: float = math.inf, timed: bool = True) -> Solution:
        """The schedule that the rules make; one slower than `limit` is given up, with an infinite makespan.

        Unless `timed`, it is decided as if operations took no time: in order of `earliest`.
        """
        sequence = np.empty(self.graph.size, np.int64)
        problem = self.graph.tables, self.lanes, self.stages, rules, self.caps, self.capped
        return Solution(*list_operations(*problem, limit, float(timed), self._scratch, self._drain, sequence), sequence)

    def follow(self, aim: np.ndarray, early: float) -> Solution:
        """The schedule of `aim`, float64[operations]: the earliest aim first, none begun more than `early` before."""
        return self.dispatch(Rules(aim, np.maximum(0.0, aim - early), self.any_window, self.unreserved))

    def in_order(self, aim: np.ndarray) -> Solution:
        """The schedule that takes operations by `aim` alone, of those that may come next; equals by their number."""
        turn = np.arange(self.graph.size, dtype=float)
        return self.dispatch(Rules(turn, aim, self.any_window, self.unreserved), timed=False)

    def rules(self, largest: int, others: int, forward_first: bool, model_first: bool) -> Rules:
        """1F1B's windows with so many sixteenths of the stages more; `builders.lane_ranks`."""
        pipelines = self.graph.problem.pipelines
        large = max(pipelines, key=pipeline_work).model
        extra = [math.ceil((largest if p.model == large else others) * p.stages / 16) for p in pipelines]
        windows = [max(1, p.stages - stage + more) for p, more in zip(pipelines, extra) for stage in range(p.stages)]
        turn = np.array(lane_ranks(self.graph, forward_first, model_first), float)[self.graph.lane]
        return Rules(turn, self.any_time, np.array(windows), self.unreserved)


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


@njit(**IN_PLACE)
def list_operations(
    t: Tables,
    lanes: _Lanes,
    stages: Stages,
    rules: Rules,
    caps: np.ndarray,
    capped: bool,
    limit: float,
    pace: float,
    s: _Scratch,
    drain: Drain,
    sequence: np.ndarray,
):
    """Run the list scheduler: an idle node takes, of what may begin, the smallest `turn`; returns (makespan, peak).

    What decides are times `pace` (1 or 0) times as long, and `earliest`; the orders run without waiting for the latter,
    and their ends are kept beside. An operation wakes its node when it is its lane's next, its input is there and its
    `earliest` has come; so does the end of the one before. One that was refused is refused until its node has run
    another: nothing elsewhere helps it, unless a B takes memory (draining.py). With any left out, makespan is infinite.
    """
    n, nodes = len(sequence), len(s.free)
    hopeless = limit * (1 + 1e-9)  # beyond what sums of the same times in another order differ by
    s.done[:] = 0
    s.refused[:] = -1
    s.barred[:] = 0
    s.held[:] = 0
    s.free[:] = -np.inf
    s.clock[:] = 0.0
    s.level[:] = 0.0
    s.left[:] = 0.0
    s.blocked[:] = -1
    s.arrival[:] = np.inf
    for node in range(nodes):
        s.place[node] = t.first[node]
    count, ran, makespan, peak, releases = 0, 0, 0.0, 0.0, 0
    for o in range(n):
        s.left[t.node[o]] += t.duration[o]
        if t.upstream[o] < 0:
            s.arrival[o] = -np.inf
            if o == lanes.first[t.lane[o]]:
                count = heap_push(s.heap_key, s.heap_item, count, rules.earliest[o], o)
    while count > 0:
        now, node = s.heap_key[0], t.node[s.heap_item[0]]
        count = heap_pop(s.heap_key, s.heap_item, count)
        if now < s.free[node]:
            continue
        stamp = s.place[node] + releases
        best = _next_on(t, lanes, rules, s, node, now, stamp)
        while capped and best >= 0 and t.memory[best] > 0:
            if _admitted(t, lanes, stages, rules, caps, s, drain, best):
                break
            s.refused[t.lane[best]], s.blocked[node] = stamp, best
            best = _next_on(t, lanes, rules, s, node, now, stamp)
        if best < 0 or (rules.patience > 0 and _waits(t, lanes, rules, caps, s, best, now)):
            continue
        lane = t.lane[best]
        s.done[lane] += 1
        ran += 1
        s.blocked[node] = -1
        s.held[lanes.stage[lane]] += lanes.takes[lane]
        s.level[node] += t.memory[best]
        peak = max(peak, s.level[node])
        if capped and t.memory[best] > 0:
            for k in range(lanes.first_on[node], lanes.first_on[node + 1]):
                other = lanes.on_node[k]
                if s.barred[other] and s.level[node] + t.memory[lanes.first[other]] > caps[node]:
                    s.barred[other] = 0
        s.free[node] = now + pace * t.duration[best]
        source = t.upstream[best]
        if source >= 0:
            s.clock[node] = max(s.clock[node], s.end[source] + t.lag[best])
        s.clock[node] = s.end[best] = s.clock[node] + t.duration[best]
        makespan = max(makespan, s.clock[node])
        s.left[node] -= t.duration[best]
        if makespan > limit or s.clock[node] + s.left[node] > hopeless:
            return np.inf, peak
        sequence[s.place[node]] = best
        s.place[node] += 1
        wakes = capped or pace > 0  # else each wakes the node in its turn
        if wakes:
            count = heap_push(s.heap_key, s.heap_item, count, s.free[node], best)
        if s.done[lane] < lanes.microbatches[lane] and s.arrival[best + 1] < np.inf:
            ready = max(s.free[node], s.arrival[best + 1], rules.earliest[best + 1])
            if not wakes or ready > s.free[node]:
                count = heap_push(s.heap_key, s.heap_item, count, ready, best + 1)
        for k in range(2):
            target = t.downstream[best, k]
            if target >= 0:
                s.arrival[target] = s.free[node] + pace * t.lag[target]
                ready = max(s.arrival[target], rules.earliest[target])
                due = target == lanes.first[t.lane[target]] + s.done[t.lane[target]]
                if due and ready >= s.free[t.node[target]]:  # a busy node looks again when it is free
                    count = heap_push(s.heap_key, s.heap_item, count, ready, target)
        if stages.grows and capped and t.memory[best] < 0:
            releases += 1
            for other in range(nodes):
                if s.blocked[other] >= 0:
                    count = heap_push(s.heap_key, s.heap_item, count, now, s.blocked[other])
                    s.blocked[other] = -1
    return (makespan if ran == n else np.inf), peak


@njit(**IN_PLACE)
def _next_on(t: Tables, lanes: _Lanes, rules: Rules, s: _Scratch, node: int, now: float, stamp: int) -> int:
    """The operation of the smallest turn that may begin on `node`, of lanes not refused at this stamp; or -1."""
    best = -1
    for k in range(lanes.first_on[node], lanes.first_on[node + 1]):
        lane = lanes.on_node[k]
        if s.done[lane] == lanes.microbatches[lane] or s.refused[lane] == stamp:
            continue
        o, stage = lanes.first[lane] + s.done[lane], lanes.stage[lane]
        if max(s.arrival[o], rules.earliest[o]) > now or (best >= 0 and rules.turn[o] >= rules.turn[best]):
            continue
        if not (lanes.takes[lane] > 0 and s.held[stage] >= rules.window[stage]):
            best = o
    return best


@njit(**IN_PLACE)
def _admitted(
    t: Tables,
    lanes: _Lanes,
    stages: Stages,
    rules: Rules,
    caps: np.ndarray,
    s: _Scratch,
    drain: Drain,
    o: int,
) -> bool:
    """Whether there is memory for `o`, beside what is reserved if it admits a micro-batch, and all can drain then."""
    node, lane = t.node[o], t.lane[o]
    stage, wanted = lanes.stage[lane], s.level[node] + t.memory[o]
    if t.upstream[o] < 0 and not rules.reserved[stage]:
        for k in range(lanes.first_on[node], lanes.first_on[node + 1]):
            other = lanes.on_node[k]
            g = lanes.stage[other]
            if lanes.takes[other] > 0 and rules.reserved[g]:
                more = min(rules.window[g] - s.held[g], lanes.microbatches[other] - s.done[other])
                wanted += max(0, more) * stages.activation[g]
    if wanted > caps[node] or s.barred[lane]:
        return False
    if lanes.takes[lane] > 0 and not stages.grows and stages.first[stages.pipeline[stage] + 1] - 1 == stage:
        return True  # it needs no more
    s.done[lane] += 1
    s.level[node] += t.memory[o]
    drains = can_drain(stages, s.done, s.level, caps, stages.pipeline[stage], s.done[lane] - 1, drain)
    s.done[lane] -= 1
    s.level[node] -= t.memory[o]
    # What is done since could have been done behind it, for which there was room: then it cannot drain now either.
    s.barred[lane] = not (drains or stages.grows)
    return drains


@njit(**IN_PLACE)
def _waits(t: Tables, lanes: _Lanes, rules: Rules, caps: np.ndarray, s: _Scratch, best: int, now: float) -> bool:
    """Whether something of an earlier turn comes, for which there is room, before `best` would be far."""
    node = t.node[best]
    for k in range(lanes.first_on[node], lanes.first_on[node + 1]):
        lane = lanes.on_node[k]
        if s.done[lane] == lanes.microbatches[lane]:
            continue
        o, stage = lanes.first[lane] + s.done[lane], lanes.stage[lane]
        ready = max(s.arrival[o], rules.earliest[o])
        if rules.turn[o] < rules.turn[best] and now < ready < now + rules.patience * t.duration[best]:
            if lanes.takes[lane] <= 0 or s.held[stage] < rules.window[stage]:
                if s.level[node] + t.memory[o] <= caps[node]:
                    return True
    return False


# A binary heap in two arrays, the smallest (key, item) first: heapq in numba takes half as long again.


@njit(**IN_PLACE)
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


@njit(**IN_PLACE)
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
