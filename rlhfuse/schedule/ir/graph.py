"""The operations of a problem as numbered arrays: the one place that encodes and decodes actions.

An operation has at most one *upstream*, whose output it takes: F at stage s takes F at s-1, B takes B at s+1 (F at the
last stage), W takes B of its stage. All micro-batches of one (pipeline, stage, kind) are a *lane* and run in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline


@dataclass(frozen=True)
class Lane:
    """All micro-batches of one kind on one stage; operation m of the lane has number `first` + m."""

    pipeline: int
    stage: int
    kind: Kind
    node: int
    first: int
    microbatches: int


class Tables(NamedTuple):
    """A graph as the kernels of the search take it; `first[node]` is the first position of a node in a sequence."""

    node: np.ndarray
    lane: np.ndarray
    duration: np.ndarray
    upstream: np.ndarray
    lag: np.ndarray
    downstream: np.ndarray
    memory: np.ndarray
    first: np.ndarray  # int64[nodes + 1]


@dataclass(frozen=True, eq=False)
class OperationGraph:
    """Arrays over the n operations of `problem`; -1 stands for none.

    node, lane, upstream: int64[n]; downstream: int64[n, 2]; duration, lag (transfer from upstream): float64[n];
    memory: float64[n], what an operation takes when it starts; negative: what it gives back when it ends.
    """

    problem: FusionProblem
    lanes: tuple[Lane, ...]
    node: np.ndarray
    lane: np.ndarray
    duration: np.ndarray
    upstream: np.ndarray
    lag: np.ndarray
    downstream: np.ndarray
    memory: np.ndarray

    @property
    def size(self) -> int:
        return len(self.node)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The action of each operation."""
        names = [pipeline.name for pipeline in self.problem.pipelines]
        of_lanes = ((lane, names[lane.pipeline], m) for lane in self.lanes for m in range(lane.microbatches))
        return tuple(Action(name, lane.stage, lane.kind, m) for lane, name, m in of_lanes)

    @cached_property
    def number(self) -> dict[Action, int]:
        """Operation number of each action."""
        return {action: i for i, action in enumerate(self.actions)}

    @cached_property
    def tables(self) -> Tables:
        first = np.concatenate([[0], np.cumsum(np.bincount(self.node, minlength=self.problem.nodes))]).astype(np.int64)
        arrays = self.node, self.lane, self.duration, self.upstream, self.lag, self.downstream, self.memory
        return Tables(*arrays, first)


def kinds_of(pipeline: Pipeline) -> tuple[Kind, ...]:
    """The computing kinds of a pipeline, in the order in which a micro-batch meets them on a stage."""
    return (Kind.F, Kind.B, Kind.W) if pipeline.split else (Kind.F, Kind.B)


def memory_of(pipeline: Pipeline, kind: Kind, stage: int) -> float:
    """What a computing action takes when it starts; negative: what it gives back when it ends."""
    activation, later = pipeline.activation[stage], pipeline.held_for_weights[stage]
    return {Kind.F: activation, Kind.B: later - activation, Kind.W: -later}[kind]


@lru_cache(maxsize=8)  # a schedule is made, checked and timed in one graph
def build_graph(problem: FusionProblem) -> OperationGraph:
    """Number every operation of `problem` and connect it to what it depends on."""
    lanes = _lanes(problem)
    first = {(lane.pipeline, lane.stage, lane.kind): lane.first for lane in lanes}
    n = sum(lane.microbatches for lane in lanes)
    node, lane_of, upstream = (np.full(n, -1, np.int64) for _ in range(3))
    duration, lag, memory = (np.zeros(n) for _ in range(3))
    for number, lane in enumerate(lanes):
        pipeline = problem.pipelines[lane.pipeline]
        mine = slice(lane.first, lane.first + lane.microbatches)
        node[mine], lane_of[mine] = lane.node, number
        times = {Kind.F: pipeline.forward, Kind.B: pipeline.backward, Kind.W: pipeline.weight_gradient}
        duration[mine] = times[lane.kind][lane.stage]
        memory[mine] = memory_of(pipeline, lane.kind, lane.stage)
        source = _source(pipeline, lane.stage, lane.kind)
        if source is not None:
            upstream[mine] = np.arange(lane.microbatches) + first[(lane.pipeline, *source)]
            lag[mine] = problem.transfer if pipeline.placement[source[0]] != lane.node else 0
    return OperationGraph(problem, lanes, node, lane_of, duration, upstream, lag, _downstream(upstream), memory)


def _lanes(problem: FusionProblem) -> tuple[Lane, ...]:
    lanes, first = [], 0
    for p, pipeline in enumerate(problem.pipelines):
        for stage, node in enumerate(pipeline.placement):
            for kind in kinds_of(pipeline):
                lanes.append(Lane(p, stage, kind, node, first, pipeline.microbatches))
                first += pipeline.microbatches
    return tuple(lanes)


def _source(pipeline: Pipeline, stage: int, kind: Kind) -> tuple[int, Kind] | None:
    """(stage, kind) of the operation that feeds this one for the same micro-batch."""
    if kind is Kind.F:
        return (stage - 1, Kind.F) if stage else None
    if kind is Kind.W:
        return (stage, Kind.B)
    return (stage + 1, Kind.B) if stage + 1 < pipeline.stages else (stage, Kind.F)


def _downstream(upstream: np.ndarray) -> np.ndarray:
    """What each operation feeds, in order of number: at most two, since a W and an earlier stage's B share a source."""
    downstream = np.full((len(upstream), 2), -1, np.int64)
    fed = np.flatnonzero(upstream >= 0)
    fed = fed[np.argsort(upstream[fed], kind="stable")]
    sources = upstream[fed]
    second = np.zeros(len(fed), np.int64)
    second[1:] = sources[1:] == sources[:-1]
    downstream[sources, second] = fed
    return downstream
