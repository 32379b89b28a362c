"""Chimera's schedule: two pipelines of equal depth in opposite directions over the same nodes.

On a grid of slots, stage s of either pipeline runs the forward of its micro-batch j in slot s + 2j and the
backward in slot 2P - 1 - s + 2j. With P even the two directions never want the same slot of a node, and
P/2 micro-batches of each (a unit) leave P - 2 slots of a node empty. Four nodes, down a, up b:

    node 0:  a0F  .  a1F b0F b0B b1F b1B a0B  .  a1B
    node 1:   .  a0F b0F a1F b1F b0B a0B b1B a1B  .
    node 2:   .  b0F a0F b1F a1F a0B b0B a1B b1B  .
    node 3:  b0F  .  b1F a0F a0B a1F a1B b0B  .  b1B

The next unit follows 2P slots later and fits into the gaps of the one before, so N micro-batches in all take
2N + P - 2 slots (1F1B: 2N + 2P - 2), the least possible. The order of the grid is valid under any times and lags.
With backwards of twice the forward one unit is still optimal (3N + 2P - 4 forwards, 1F1B: 3N + 3P - 3), but units
do not close up. So a second order is made: the list scheduler under 1F1B's caps runs forwards before backwards and
either by slot, which closes the gaps for one activation more. The faster of the two is taken.

Knows nothing of search. Paper: Figure 6 (a), after Li and Hoefler, "Chimera", section 3.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import list_schedule
from rlhfuse.schedule.rules.fixed_order import check_single_visits, schedule_of_rows


def chimera(problem: FusionProblem) -> Schedule:
    """The bidirectional schedule of every pair of opposed pipelines, pairs one after the other.

    The two are of one model (`bidirectional_problem` makes them) or of two. Raises InputError naming a
    pipeline without a partner, of an odd number of stages, or that visits a node twice.
    """
    orders: list[tuple[Action, ...]] = [()] * problem.nodes
    for pair in _pairs(problem):
        part = replace(problem, pipelines=pair)
        schedule = min(_by_grid(part), _by_list(part), key=_cost)
        orders = [before + after for before, after in zip(orders, schedule.orders)]
    return Schedule(problem, tuple(orders))


def bidirectional_problem(problem: FusionProblem) -> FusionProblem:
    """Every pipeline replaced by two replicas, name.down and name.up, with half of its micro-batches each.

    Each node then holds a stage of either replica, so static memory doubles. Raises InputError with the
    arithmetic on odd micro-batches or stages, and on a pipeline that visits a node twice.
    """
    pipelines: list[Pipeline] = []
    for pipeline in problem.pipelines:
        _check_even(pipeline, "micro-batches", pipeline.microbatches)
        _check_even(pipeline, "stages", pipeline.stages)
        check_single_visits(pipeline, "Chimera")
        half = replace(pipeline, name=f"{pipeline.name}.down", microbatches=pipeline.microbatches // 2)
        pipelines += [half, replace(half, name=f"{pipeline.name}.up", placement=half.placement[::-1])]
    return replace(problem, pipelines=tuple(pipelines), static_memory=_doubled(problem.static_memory))


def _by_grid(pair: FusionProblem) -> Schedule:
    rows: list[list[Action]] = [[] for _ in range(pair.nodes)]
    for pipeline in pair.pipelines:
        for stage, node in enumerate(pipeline.placement):
            rows[node] += [
                Action(pipeline.name, stage, kind, m) for kind in (Kind.F, Kind.B) for m in range(pipeline.microbatches)
            ]
    depth = pair.pipelines[0].stages
    return schedule_of_rows(pair, [sorted(row, key=lambda action: _slot(action, depth)) for row in rows])


def _by_list(pair: FusionProblem) -> Schedule:
    graph, depth = build_graph(pair), pair.pipelines[0].stages
    caps = {(p, stage): depth - stage for p in range(2) for stage in range(depth)}
    turns = [(a.kind is not Kind.F, _slot(a, depth), a.kind is Kind.W) for a in graph.actions]
    return list_schedule(graph, caps, turns)


def _slot(action: Action, depth: int) -> int:
    """Place on the grid; that of a W is its B's."""
    unit, j = divmod(action.microbatch, depth // 2)
    begin = 2 * depth * unit + 2 * j
    return begin + (action.stage if action.kind is Kind.F else 2 * depth - 1 - action.stage)


def _cost(schedule: Schedule) -> tuple[Number, Number]:
    timeline = evaluate(schedule)
    return timeline.makespan, timeline.peak_memory


def _pairs(problem: FusionProblem) -> list[tuple[Pipeline, Pipeline]]:
    """Every pipeline with one of the reversed placement, of its own model if there is one."""
    waiting, pairs = list(problem.pipelines), []
    while waiting:
        down = waiting.pop(0)
        check_single_visits(down, "Chimera")
        _check_even(down, "stages", down.stages)
        opposed = [p for p in waiting if p.placement == down.placement[::-1]]
        if not opposed:
            raise InputError(
                f"Chimera: pipeline {down.name} on nodes {list(down.placement)} has no partner in the opposite "
                "direction; make the problem with bidirectional_problem"
            )
        up = min(opposed, key=lambda p: p.model != down.model)
        waiting.remove(up)
        pairs.append((down, up))
    return pairs


def _check_even(pipeline: Pipeline, what: str, count: int) -> None:
    if count % 2:
        raise InputError(f"Chimera: pipeline {pipeline.name} has {count} {what}, {count} % 2 = 1, must be 0")


def _doubled(static: Number | tuple[Number, ...]) -> Number | tuple[Number, ...]:
    return tuple(2 * entry for entry in static) if isinstance(static, tuple) else 2 * static
