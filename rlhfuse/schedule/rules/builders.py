"""Schedules made by rule: 1F1B one model after the other, GPipe, the paper's greedy, capped greedy.

All of them come from one list scheduler: whenever a node is idle it takes, among the operations whose
input has arrived, the one of the best rank; a forward waits while its stage already holds its cap of
micro-batches in flight. 1F1B is that rule with backwards first and a cap of P - s on stage s.

Schedules of other shapes have files of their own: halved.py (1F1B+), interleaved.py, time_sharing.py (PUZZLE),
bidirectional.py (Chimera).

Knows nothing of search. Paper: section 5.2, "a naive solution" (greedy) and the serial 1F1B baseline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import evaluate, tidy
from rlhfuse.schedule.ir.graph import Lane, OperationGraph, build_graph, kinds_of
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule

Caps = Mapping[tuple[int, int], int]  # (pipeline number, stage) -> micro-batches in flight


def serial_1f1b(problem: FusionProblem, in_flight: int | None = None) -> Schedule:
    """Each model by itself in 1F1B order, models in order of appearance on every node.

    No barrier stands between the models: a node that has finished one begins the next. `in_flight`
    lowers the cap on every stage to at most that many micro-batches.
    """
    return _one_model_after_another(problem, lambda p, s: min(p.stages - s, in_flight or p.stages))


def gpipe(problem: FusionProblem) -> Schedule:
    """Each model by itself, all forwards of a stage before its backwards."""
    return _one_model_after_another(problem, lambda p, s: p.microbatches, forward_first=True)


def greedy(problem: FusionProblem) -> Schedule:
    """The paper's greedy: run whatever is ready, the larger model's first, memory not regarded."""
    graph = build_graph(problem)
    caps = {key: problem.pipelines[key[0]].microbatches for key in _stages(problem)}
    return list_schedule(graph, caps, _ranks(graph))


def capped_greedy(
    problem: FusionProblem, extra: Mapping[str, int] | int = 0, forward_first: bool = True, model_first: bool = True
) -> Schedule:
    """Greedy under 1F1B's caps plus `extra` micro-batches (one number, or one per model) on every stage.

    Under a cap it pays to run forwards first: they fill the pipelines up to the cap and no further.
    With `model_first` the larger model goes before the direction, else after it.
    """
    graph = build_graph(problem)
    more = extra if isinstance(extra, Mapping) else dict.fromkeys(problem.models, extra)
    caps = {
        (p, s): max(1, problem.pipelines[p].stages - s + more[problem.pipelines[p].model]) for p, s in _stages(problem)
    }
    return list_schedule(graph, caps, _ranks(graph, forward_first, model_first))


@lru_cache(maxsize=4)  # every schedule of a problem that is written names it
def serial_makespan(problem: FusionProblem) -> Number:
    """Time of training one model after the other with 1F1B, a barrier (the optimizer step) between them."""
    return tidy(sum(evaluate(serial_1f1b(part)).makespan for part in _parts(problem)))


@lru_cache(maxsize=4)
def serial_peak_memory(problem: FusionProblem) -> Number:
    """Peak activation memory of the same."""
    return tidy(max(evaluate(serial_1f1b(part)).peak_memory for part in _parts(problem)))


def pipeline_work(pipeline: Pipeline) -> Number:
    """Time of one micro-batch over all stages, both directions: how large its model is."""
    return sum(pipeline.forward) + sum(pipeline.backward) + sum(pipeline.weight_gradient or ())


def list_schedule(graph: OperationGraph, caps: Caps, ranks: Sequence) -> Schedule:
    """Run the list scheduler. `ranks[operation]`: the smallest goes first; every cap is at least 1."""
    problem = graph.problem
    lanes_on: list[list[int]] = [[] for _ in range(problem.nodes)]
    for number, lane in enumerate(graph.lanes):
        lanes_on[lane.node].append(number)
    arrival = [0.0 if source < 0 else math.inf for source in graph.upstream.tolist()]
    node_of, duration, lag = graph.node.tolist(), graph.duration.tolist(), graph.lag.tolist()
    downstream = graph.downstream.tolist()
    done = [0] * len(graph.lanes)
    held = dict.fromkeys(_stages(problem), 0)
    release = [kinds_of(p)[-1] for p in problem.pipelines]
    free = [0.0] * problem.nodes
    orders: list[list] = [[] for _ in range(problem.nodes)]
    wakes = [(0.0, node) for node in range(problem.nodes)]
    while wakes:
        now, node = heapq.heappop(wakes)
        if now < free[node]:
            continue
        number = _pick(graph, lanes_on[node], ranks, done, arrival, now, held, caps)
        if number is None:
            continue
        lane = graph.lanes[number]
        operation = lane.first + done[number]
        done[number] += 1
        held[lane.pipeline, lane.stage] += (lane.kind is Kind.F) - (lane.kind is release[lane.pipeline])
        free[node] = now + duration[operation]
        orders[node].append(graph.actions[operation])
        heapq.heappush(wakes, (free[node], node))
        for target in downstream[operation]:
            if target >= 0:
                arrival[target] = free[node] + lag[target]
                heapq.heappush(wakes, (arrival[target], node_of[target]))
    return Schedule(problem, tuple(tuple(order) for order in orders))


def _pick(
    graph: OperationGraph,
    candidates: list[int],
    ranks: Sequence,
    done: list[int],
    arrival: list[float],
    now: float,
    held: Mapping[tuple[int, int], int],
    caps: Caps,
) -> int | None:
    """The lane of `candidates` with the best operation next that has its input and room under the cap."""
    best, best_rank = None, None
    for number in candidates:
        lane: Lane = graph.lanes[number]
        operation = lane.first + done[number]
        if done[number] == lane.microbatches or arrival[operation] > now:
            continue
        if best is not None and ranks[operation] >= best_rank:
            continue
        if lane.kind is Kind.F and held[lane.pipeline, lane.stage] >= caps[lane.pipeline, lane.stage]:
            continue
        best, best_rank = number, ranks[operation]
    return best


def _stages(problem: FusionProblem) -> list[tuple[int, int]]:
    return [(p, s) for p, pipeline in enumerate(problem.pipelines) for s in range(pipeline.stages)]


def _ranks(graph: OperationGraph, forward_first: bool = False, model_first: bool = True) -> list[int]:
    """Of every operation: by size of the model and by direction, then by number so that ties are fixed."""
    order = (Kind.F, Kind.B, Kind.W) if forward_first else (Kind.B, Kind.F, Kind.W)
    ranks = []
    for lane in graph.lanes:
        size, direction = -pipeline_work(graph.problem.pipelines[lane.pipeline]), order.index(lane.kind)
        rank = (size, direction) if model_first else (direction, size)
        ranks.append((*rank, lane.pipeline, lane.stage))
    place = {rank: position for position, rank in enumerate(sorted(ranks))}
    return [place[rank] for lane, rank in zip(graph.lanes, ranks) for _ in range(lane.microbatches)]


def _parts(problem: FusionProblem) -> list[FusionProblem]:
    """The problem with one model at a time."""
    return [
        replace(problem, pipelines=tuple(p for p in problem.pipelines if p.model == model)) for model in problem.models
    ]


def _one_model_after_another(problem: FusionProblem, cap, forward_first: bool = False) -> Schedule:
    orders: list[tuple] = [()] * problem.nodes
    for part in _parts(problem):
        graph = build_graph(part)
        caps = {(p, s): cap(part.pipelines[p], s) for p, s in _stages(part)}
        rows = list_schedule(graph, caps, _ranks(graph, forward_first)).orders
        orders = [before + after for before, after in zip(orders, rows)]
    return Schedule(problem, tuple(orders))
