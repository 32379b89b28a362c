"""Earliest start and latest end of every operation: what any schedule by a given time must keep to.

An operation has a *head* (no schedule starts it earlier) and a *tail* (at least this much time follows its end): in a
schedule of makespan X it runs within [head, X - tail]. A stage holds at most K = floor(room on its node / activation)
micro-batches. Operations are numbered by pipeline, micro-batch and position in the micro-batch's own chain, so that
everything follows what it needs whatever K is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlhfuse.schedule.bounds.window_rules import SLACK, contradiction, least_makespan, propagate_precedence
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline

MAX_PASSES = 60  # stopping early proves less, never something false
NARROW_WORK = 3_000_000  # the rule takes the squares of the nodes' operations; with more in all it is left out


@dataclass(frozen=True)
class Hold:
    """Micro-batch m is held on `node` from the start of operation `forward[m]` to the end of `release[m]`.

    K of them take at least K * `activation`, and a single one `single`: when it comes to the pipeline's last stage,
    every stage before holds it. Until its B it is held by the earlier stages on the same node too, whose B come later.
    A split backward holds from F to W what is held in both parts, and from B to W what W needs.
    """

    pipeline: int
    node: int
    activation: float
    single: float
    forward: np.ndarray
    release: np.ndarray

    def lane(self) -> tuple[int, int, int, int]:
        """First forward, first release, step from a micro-batch to the next, micro-batches."""
        count = len(self.forward)
        return self.forward[0], self.release[0], (self.forward[-1] - self.forward[0]) // max(1, count - 1), count


@dataclass(frozen=True, eq=False)
class Windows:
    """Arrays over n operations, -1 stands for none; the windows themselves are made for each question.

    duration, lag (transfer from upstream): float64[n]; node, upstream, previous (micro-batch): int64[n]; room (the
    releases to wait for): int64[n, 2]; first[k + 1] - first[k]: the number of operations of node k.
    """

    node: np.ndarray
    duration: np.ndarray
    upstream: np.ndarray
    lag: np.ndarray
    previous: np.ndarray
    room: np.ndarray
    first: np.ndarray
    holds: tuple[Hold, ...]
    capacity: tuple[float, ...] = ()  # of each node; none: not regarded

    @staticmethod
    def of(problem: FusionProblem) -> Windows:
        """Windows of `problem` with every rule still to be applied and memory not regarded."""
        parts, holds, base = [], [], 0
        for number, pipeline in enumerate(problem.pipelines):
            parts.append(_chains(problem, pipeline, base))
            holds += _holds(number, pipeline, base)
            base += len(parts[-1][0])
        node, duration, lag, upstream, previous = (np.concatenate(column) for column in zip(*parts))
        return Windows(
            node=node,
            duration=duration,
            upstream=upstream,
            lag=lag,
            previous=previous,
            room=np.full((base, 2), -1),
            first=np.concatenate(([0], np.cumsum(np.bincount(node, minlength=problem.nodes)))),
            holds=tuple(holds),
        )

    def within(self, capacity: Sequence[float]) -> Windows | None:
        """The same with at most `capacity[node]` of activations held; None where one micro-batch does not fit."""
        room = np.full_like(self.room, -1)
        for hold in self.holds:
            most_memory = capacity[hold.node] * (1 + SLACK)
            if hold.single > most_memory:
                return None
            if hold.activation * len(hold.forward) <= most_memory:
                continue
            most = int(most_memory / hold.activation)
            waiting = hold.forward[most:]
            room[waiting, np.where(room[waiting, 0] < 0, 0, 1)] = hold.release[: len(hold.release) - most]
        return replace(self, room=room, capacity=tuple(capacity))

    @cached_property
    def least_makespan(self) -> float:
        """The largest lower bound of precedence and of the work of a node: no makespan need be supposed for it."""
        heads, tails, by_head, by_tail = self._start
        return least_makespan(heads, tails, self.duration, by_head, by_tail, self.first)

    def excludes(self, makespan: float, disjunctions: bool = False) -> bool:
        """Whether the rules prove that no schedule has a makespan of at most `makespan`.

        `disjunctions` applies the rule for two pipelines as well, where there is a capacity; it takes longer.
        """
        if self.least_makespan > makespan * (1 + SLACK):
            return True
        if np.sum(np.diff(self.first) ** 2) > NARROW_WORK:
            return False
        links = self.upstream, self.lag, self.previous, self.room
        clashes = self._clashes if disjunctions else np.zeros((0, 10), np.int64)
        heads, tails, by_head, by_tail = map(np.copy, self._start)
        limit = self.first, clashes, float(makespan), MAX_PASSES
        return contradiction(heads, tails, self.duration, *links, by_head, by_tail, *limit)

    @cached_property
    def _clashes(self) -> np.ndarray:
        """Per row two pipelines' holds on a node and the least numbers (x, y) of them that do not fit together.

        int64[k, 10]: first forward, first release, step to the next micro-batch, micro-batches and x or y of either.
        """
        rows = []
        for a, b in itertools.combinations(self.holds if self.capacity else (), 2):
            if a.node != b.node or a.pipeline == b.pipeline or not a.activation or not b.activation:
                continue
            fewest, space = len(b.forward) + 1, self.capacity[a.node] * (1 + SLACK)
            lanes = a.lane(), b.lane()
            for x in range(1, len(a.forward) + 1):
                y = max(0, int((space - x * a.activation) // b.activation) + 1)
                if 0 < y < fewest:
                    rows.append((*lanes[0], x, *lanes[1], y))
                    fewest = y
        return np.array(rows, np.int64).reshape(-1, 10)

    @cached_property
    def _start(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Heads and tails by precedence, and the operations node by node, once by head and once by tail, ascending."""
        heads, tails = np.zeros((2, len(self.node)))
        propagate_precedence(heads, tails, self.duration, self.upstream, self.lag, self.previous, self.room)
        return heads, tails, np.lexsort((heads, self.node)), np.lexsort((tails, self.node))


def _chains(problem: FusionProblem, pipeline: Pipeline, base: int) -> tuple[np.ndarray, ...]:
    """node, duration, lag, upstream and previous of a pipeline's operations, numbered from `base`.

    One micro-batch is F at stage 0..P-1, B at stage P-1..0, then W at stage 0..P-1 when split.
    """
    stages, count = pipeline.stages, pipeline.microbatches
    placement = np.array(pipeline.placement)
    node = np.concatenate((placement, placement[::-1]))
    duration = np.concatenate((pipeline.forward, pipeline.backward[::-1]))
    upstream = np.arange(-1, 2 * stages - 1)
    lag = np.where(node != np.roll(node, 1), problem.transfer, 0).astype(float)
    if pipeline.weight_gradient is not None:
        node = np.concatenate((node, placement))
        duration = np.concatenate((duration, pipeline.weight_gradient))
        upstream = np.concatenate((upstream, np.arange(2 * stages - 1, stages - 1, -1)))
        lag = np.concatenate((lag, np.zeros(stages)))
    lag[0] = 0
    length = len(node)
    start = base + length * np.repeat(np.arange(count), length)
    upstream = np.tile(upstream, count)
    upstream = np.where(upstream >= 0, upstream + start, -1)
    previous = base + np.arange(length * count) - length
    previous[:length] = -1
    return np.tile(node, count), np.tile(duration.astype(float), count), np.tile(lag, count), upstream, previous


def _holds(number: int, pipeline: Pipeline, base: int) -> list[Hold]:
    stages = pipeline.stages
    length = (3 if pipeline.split else 2) * stages
    start = base + length * np.arange(pipeline.microbatches)
    holds = []
    for stage, node in enumerate(pipeline.placement):
        activation = float(sum(a for n, a in zip(pipeline.placement[: stage + 1], pipeline.activation) if n == node))
        own, later = float(pipeline.activation[stage]), float(pipeline.held_for_weights[stage])
        single = activation + max(0.0, later - own)
        forward, backward, weight = start + stage, start + 2 * stages - 1 - stage, start + 2 * stages + stage
        if activation > min(own, later) or not pipeline.split:
            holds.append(Hold(number, node, activation, single, forward, backward))
        if pipeline.split:
            holds.append(Hold(number, node, min(own, later), single, forward, weight))
        if later > own:
            holds.append(Hold(number, node, later, single, backward, weight))
    return holds
