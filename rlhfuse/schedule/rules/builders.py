"""Schedules made by rule: serial 1F1B, the paper's greedy, one micro-batch at a time.

A list scheduler makes the first two: a node that is idle takes, of the operations whose input has arrived, the one of
the best rank; a forward waits while its stage holds its cap of micro-batches. 1F1B is backwards first under a cap of
P - s. Also the 1F1B pattern over given orders, which interleaved.py and time_sharing.py use. Paper: section 5.2.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate, loosen, tidy
from rlhfuse.schedule.ir.graph import Lane, OperationGraph, build_graph, kinds_of
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule

Caps = Mapping[tuple[int, int], int]  # (pipeline number, stage) -> micro-batches in flight


def serial_1f1b(problem: FusionProblem) -> Schedule:
    """Each model by itself in 1F1B order, models in order of appearance on every node.

    No barrier stands between the models: a node that has finished one begins the next.
    """
    orders: list[tuple[Action, ...]] = [()] * problem.nodes
    for part in _one_model_problems(problem):
        graph = build_graph(part)
        caps = {(p, s): part.pipelines[p].stages - s for p, s in _stages(part)}
        rows = list_schedule(graph, caps, lane_ranks(graph)).orders
        orders = [before + after for before, after in zip(orders, rows)]
    return Schedule(problem, tuple(orders))


def greedy(problem: FusionProblem) -> Schedule:
    """The paper's greedy: run whatever is ready, the larger model's first, memory not regarded."""
    graph = build_graph(problem)
    caps = {(p, s): problem.pipelines[p].microbatches for p, s in _stages(problem)}
    return list_schedule(graph, caps, lane_ranks(graph))


def one_at_a_time(problem: FusionProblem) -> Schedule:
    """Every micro-batch alone: down its pipeline and up again before the next one begins. Needs the least memory."""
    orders: list[list[Action]] = [[] for _ in range(problem.nodes)]
    for pipeline in problem.pipelines:
        for microbatch in range(pipeline.microbatches):
            for stage, node in enumerate(pipeline.placement):
                orders[node].append(Action(pipeline.name, stage, Kind.F, microbatch))
            for stage, node in reversed(list(enumerate(pipeline.placement))):
                for kind in (Kind.B, Kind.W) if pipeline.split else (Kind.B,):
                    orders[node].append(Action(pipeline.name, stage, kind, microbatch))
    return Schedule(problem, tuple(tuple(order) for order in orders))


def min_memory(problem: FusionProblem) -> tuple[Number, ...]:
    """Activation memory of each node without which no schedule exists, and with which `one_at_a_time` does.

    When a stage runs the backward of a micro-batch all stages before it hold the activation, and the stage itself holds
    that or what W needs of it. A node needs the largest such sum, over all stages that it has of a pipeline.
    """
    needed = [0.0] * problem.nodes
    for pipeline in problem.pipelines:
        held = [0.0] * problem.nodes
        for node, activation, later in zip(pipeline.placement, pipeline.activation, pipeline.held_for_weights):
            needed[node] = max(needed[node], held[node] + max(activation, later))
            held[node] += activation
    return tuple(tidy(value) for value in needed)


def check_caps(problem: FusionProblem) -> None:
    """Raise InputError, with the smallest cap that would do, unless some schedule fits."""
    needed = min_memory(problem)
    short = [node for node, least in enumerate(needed) if least > loosen(problem.node_cap(node))]
    if not short:
        return
    node = max(short, key=lambda node: needed[node] - problem.node_cap(node))
    smallest = tidy(needed[node] + problem.node_static(node))
    there = " there" if isinstance(problem.memory_cap, tuple) else ""
    raise InputError(
        f"memory_cap leaves {tidy(problem.node_cap(node))} for activations on node {node}, but one micro-batch at a "
        f"time needs {needed[node]}; the smallest feasible cap{there} is {smallest}"
    )


@lru_cache(maxsize=4)  # every schedule of a problem that is written names it
def serial_makespan(problem: FusionProblem) -> Number:
    """Time of training one model after the other with 1F1B, a barrier (the optimizer step) between them."""
    return tidy(sum(evaluate(serial_1f1b(part)).makespan for part in _one_model_problems(problem)))


@lru_cache(maxsize=4)
def serial_peak_memory(problem: FusionProblem) -> Number:
    """Peak activation memory of the same."""
    return tidy(max(evaluate(serial_1f1b(part)).peak_memory for part in _one_model_problems(problem)))


def pipeline_work(pipeline: Pipeline) -> Number:
    """Time of one micro-batch over all stages, both directions: how large its model is."""
    return sum(pipeline.forward) + sum(pipeline.backward) + sum(pipeline.weight_gradient or ())


def lane_ranks(graph: OperationGraph, forward_first: bool = False, model_first: bool = True) -> list[int]:
    """Turn of every lane, the smallest first: the larger model's, then by direction, then by number.

    Without `model_first` the direction decides before the model.
    """
    order = (Kind.F, Kind.B, Kind.W) if forward_first else (Kind.B, Kind.F, Kind.W)
    work = [pipeline_work(pipeline) for pipeline in graph.problem.pipelines]
    keys = []
    for lane in graph.lanes:
        size, direction = -work[lane.pipeline], order.index(lane.kind)
        key = (size, direction) if model_first else (direction, size)
        keys.append((*key, lane.pipeline, lane.stage))
    rank = {key: position for position, key in enumerate(sorted(keys))}
    return [rank[key] for key in keys]


def list_schedule(graph: OperationGraph, caps: Caps, ranks: Sequence[int]) -> Schedule:
    """Run the list scheduler. `ranks[lane]`: the smallest goes first; every cap is at least 1."""
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
    orders: list[list[Action]] = [[] for _ in range(problem.nodes)]
    wakes = [(0.0, node) for node in range(problem.nodes)]
    now = 0.0

    def may_begin(number: int) -> bool:
        """Whether the lane's next operation has its input and room under the cap."""
        lane: Lane = graph.lanes[number]
        if done[number] == lane.microbatches or arrival[lane.first + done[number]] > now:
            return False
        return lane.kind is not Kind.F or held[lane.pipeline, lane.stage] < caps[lane.pipeline, lane.stage]

    while wakes:
        now, node = heapq.heappop(wakes)
        if now < free[node]:
            continue
        number = min(filter(may_begin, lanes_on[node]), key=ranks.__getitem__, default=None)
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


def _stages(problem: FusionProblem) -> list[tuple[int, int]]:
    return [(p, s) for p, pipeline in enumerate(problem.pipelines) for s in range(pipeline.stages)]


def _one_model_problems(problem: FusionProblem) -> list[FusionProblem]:
    return [
        replace(problem, pipelines=tuple(p for p in problem.pipelines if p.model == model)) for model in problem.models
    ]


# ---- the 1F1B pattern over given orders: valid under any times and lags


def one_forward_one_backward(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left.

    Forwards a b c d, backwards a b c d, a warm-up of two: aF bF | cF aB | dF bB | cB dB.
    """
    warm_up = min(warm_up, len(forwards))
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += [forward, backward]
    return row + list(backwards[len(forwards) - warm_up :])


def schedule_of_rows(problem: FusionProblem, rows: Sequence[Iterable[Action]]) -> Schedule:
    """The schedule of rows of F and B, one row per node; each W is put behind its B, which frees memory earliest."""
    split = {pipeline.name for pipeline in problem.pipelines if pipeline.split}
    orders = []
    for row in rows:
        order: list[Action] = []
        for action in row:
            order.append(action)
            if action.kind is Kind.B and action.pipeline in split:
                order.append(action._replace(kind=Kind.W))
        orders.append(tuple(order))
    return Schedule(problem, tuple(orders))


def by_model(problem: FusionProblem) -> list[Pipeline]:
    """Pipelines model by model, models in order of appearance."""
    return sorted(problem.pipelines, key=lambda pipeline: problem.models.index(pipeline.model))


def check_single_visits(pipeline: Pipeline, builder: str) -> None:
    """Raise InputError, naming the builder, when two stages of `pipeline` share a node."""
    for node in pipeline.placement:
        if pipeline.placement.count(node) > 1:
            raise InputError(
                f"{builder}: pipeline {pipeline.name} visits node {node} {pipeline.placement.count(node)} times; "
                "every stage needs a node of its own"
            )
