"""Whether what is in flight can still drain under the memory caps, in numba: the banker's test.

Micro-batches are drained one after the other, the oldest of a pipeline first, and each gives back all that it holds. So
a schedule that begins nothing after which this fails never comes to an end where no operation fits.
"""

# An element of an array is a number to numba, and may be an array to the stubs.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.graph import OperationGraph

IN_PLACE: dict[str, Any] = {"cache": True, "_nrt": False}  # kernels that make no array need no counts of references


class Stages(NamedTuple):
    """Arrays over the stages of all pipelines, pipeline by pipeline; those of p begin at `first[p]`."""

    first: np.ndarray  # int64[pipelines + 1]
    pipeline: np.ndarray  # int64
    node: np.ndarray  # int64
    forward: np.ndarray  # int64, lanes
    backward: np.ndarray
    weight: np.ndarray  # -1 where the backward is not split
    activation: np.ndarray  # float64
    later: np.ndarray  # float64, held from B to W
    grows: bool  # whether that is more than the activation anywhere, so that a B takes memory


class Drain(NamedTuple):
    """Scratch of the tests."""

    free: np.ndarray  # float64[nodes]
    need: np.ndarray  # float64[nodes], zero between tests
    oldest: np.ndarray  # int64[pipelines]


def stages_of(graph: OperationGraph) -> Stages:
    """The stages of the graph's problem."""
    pipelines = graph.problem.pipelines
    first = np.concatenate([[0], np.cumsum([pipeline.stages for pipeline in pipelines])])
    lanes = {kind: np.full(first[-1], -1) for kind in (Kind.F, Kind.B, Kind.W)}
    for number, lane in enumerate(graph.lanes):
        lanes[lane.kind][first[lane.pipeline] + lane.stage] = number
    activation = np.concatenate([pipeline.activation for pipeline in pipelines]).astype(float)
    later = np.concatenate([pipeline.held_for_weights for pipeline in pipelines]).astype(float)
    return Stages(
        first,
        np.repeat(np.arange(len(pipelines)), np.diff(first)),
        np.concatenate([pipeline.placement for pipeline in pipelines]),
        lanes[Kind.F],
        lanes[Kind.B],
        lanes[Kind.W],
        activation,
        later,
        bool((later > activation).any()),
    )


def new_drain(graph: OperationGraph) -> Drain:
    """The scratch of tests of the graph's problem."""
    nodes, pipelines = graph.problem.nodes, len(graph.problem.pipelines)
    return Drain(np.zeros(nodes), np.zeros(nodes), np.zeros(pipelines, np.int64))


@njit(**IN_PLACE)
def can_drain(
    stages: Stages,
    done: np.ndarray,
    level: np.ndarray,
    caps: np.ndarray,
    pipeline: int,
    microbatch: int,
    drain: Drain,
) -> bool:
    """Whether what is in flight can drain after an operation of `microbatch`; before it all could.

    `done[lane]` operations are begun, a node holds `level` of its `caps`. Once `microbatch` is drained the others can,
    as before. Exact where no B takes memory; else it may refuse what could drain in turns. Where it is exact, an
    operation for which its node has room and that is refused stays refused whatever other nodes do: they could do that
    after it as well.
    """
    for node in range(len(caps)):
        drain.free[node] = caps[node] - level[node]
    drain.oldest[pipeline] = microbatch  # those before it in its pipeline want no more than it does
    if _fits_now(stages, done, pipeline, drain):
        return True
    for stage in range(len(stages.node)):
        if stages.weight[stage] >= 0:  # a W that is due needs nothing
            due = done[stages.backward[stage]] - done[stages.weight[stage]]
            drain.free[stages.node[stage]] += due * stages.later[stage]
    for p in range(len(drain.oldest)):
        if _drain_arrived(stages, done, p, drain) and p == pipeline and microbatch < drain.oldest[p]:
            return True
    begun = drain.oldest[pipeline]
    drain.oldest[pipeline] = microbatch
    if _fits_now(stages, done, pipeline, drain):
        return True
    drain.oldest[pipeline] = begun
    drained, waiting = True, True
    while drained and waiting:
        drained, waiting = False, False
        for k in range(len(drain.oldest)):  # draining gives back only, so that any order does: the asked one first
            p = (pipeline + k) % len(drain.oldest)
            while drain.oldest[p] < done[stages.forward[stages.first[p]]]:
                if not _drain_oldest(stages, done, p, drain):
                    waiting = True
                    break
                if p == pipeline and drain.oldest[p] == microbatch:
                    return True
                drain.oldest[p] += 1
                drained = True
    return not waiting


@njit(**IN_PLACE)
def _drain_arrived(stages: Stages, done: np.ndarray, p: int, drain: Drain) -> bool:
    """Give back at once what the micro-batches of pipeline `p` hold that have come to its last stage, if each B that
    takes memory has room now; `drain.oldest[p]` is then the first that has not come there, else the first of all."""
    low, high = stages.first[p], stages.first[p + 1]
    arrived = done[stages.forward[high - 1]]
    drain.oldest[p] = done[stages.backward[low]]
    for stage in range(low, high if stages.grows else low):
        more = stages.later[stage] - stages.activation[stage]
        if 0 < more > drain.free[stages.node[stage]] and done[stages.backward[stage]] < arrived:
            return False
    for stage in range(low, high):
        drain.free[stages.node[stage]] += (arrived - done[stages.backward[stage]]) * stages.activation[stage]
    drain.oldest[p] = arrived
    return True


@njit(**IN_PLACE)
def _forwards_fit(stages: Stages, done: np.ndarray, p: int, drain: Drain) -> bool:
    """Add the room for the forwards that micro-batch `drain.oldest[p]` has left to `drain.need`, until there is none.
    True if all of it is free."""
    for stage in range(stages.first[p + 1] - 1, stages.first[p] - 1, -1):
        if done[stages.forward[stage]] > drain.oldest[p]:
            break
        node = stages.node[stage]
        drain.need[node] += stages.activation[stage]
        if drain.need[node] > drain.free[node]:
            return False
    return True


@njit(**IN_PLACE)
def _fits_now(stages: Stages, done: np.ndarray, p: int, drain: Drain) -> bool:
    """True if there is room for the rest of micro-batch `drain.oldest[p]` before it or another gives any back."""
    microbatch, fits = drain.oldest[p], _forwards_fit(stages, done, p, drain)
    low, last = stages.first[p], stages.first[p + 1] - 1
    for stage in range(low, last + 1 if stages.grows and fits else low):
        node, more = stages.node[stage], stages.later[stage] - stages.activation[stage]
        if more > 0 and done[stages.backward[stage]] <= microbatch:
            fits = fits and drain.need[node] + more <= drain.free[node]
    for stage in range(low, last + 1):
        drain.need[stages.node[stage]] = 0.0
    return fits


@njit(**IN_PLACE)
def _drain_oldest(stages: Stages, done: np.ndarray, p: int, drain: Drain) -> bool:
    """Give back what the oldest micro-batch of pipeline `p` holds, if there is room for its forwards and then for its
    backwards, each W behind its B."""
    microbatch, fits = drain.oldest[p], _forwards_fit(stages, done, p, drain)
    low, last = stages.first[p], stages.first[p + 1] - 1
    for stage in range(last if fits else low - 1, low - 1, -1):
        if done[stages.backward[stage]] <= microbatch:
            node, more = stages.node[stage], stages.later[stage] - stages.activation[stage]
            fits = fits and (more <= 0 or drain.need[node] + more <= drain.free[node])
            drain.need[node] -= stages.activation[stage]
    for stage in range(low, last + 1):
        node = stages.node[stage]
        if fits:
            drain.free[node] -= drain.need[node]
        drain.need[node] = 0.0
    return fits
