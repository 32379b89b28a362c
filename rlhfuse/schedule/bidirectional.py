"""Chimera's schedule: two pipelines of equal depth in opposite directions over the same nodes.

On a grid of slots, stage s of either pipeline runs the forward of its micro-batch j in slot s + 2j and the
backward in slot 2P - 1 - s + 2j. With P even the two directions never want the same slot of a node, and
P/2 micro-batches of each (a unit) leave P - 2 slots of a node empty. Four nodes, down a, up b:

    node 0:  a0F  .  a1F b0F b0B b1F b1B a0B  .  a1B
    node 1:   .  a0F b0F a1F b1F b0B a0B b1B a1B  .
    node 2:   .  b0F a0F b1F a1F a0B b0B a1B b1B  .
    node 3:  b0F  .  b1F a0F a0B a1F a1B b0B  .  b1B

The next unit follows 2P slots later and fits into the gaps of the one before, so N micro-batches in all take
2N + P - 2 slots (1F1B: 2N + 2P - 2), the least possible. The grid only gives the order, which is valid under any
times and lags. How good it is depends on them: with backwards of twice the forward one unit is still optimal
(3N + 2P - 4 forwards, 1F1B: 3N + 3P - 3), but units do not close up any more, and from four on 1F1B is faster.

Knows nothing of times. Paper: Figure 6 (a), after Li and Hoefler, "Chimera", section 3.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfuse.errors import InputError
from rlhfuse.schedule.action import Action, Kind
from rlhfuse.schedule.fixed_order import check_single_visits, schedule_of_rows
from rlhfuse.schedule.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.schedule import Schedule


def chimera(problem: FusionProblem) -> Schedule:
    """The bidirectional schedule of every pair of opposed pipelines, pairs one after the other.

    The two are of one model (`bidirectional_problem` makes them) or of two. Raises InputError naming a
    pipeline without a partner, of an odd number of stages, or that visits a node twice.
    """
    rows: list[list[Action]] = [[] for _ in range(problem.nodes)]
    for pair in _pairs(problem):
        for node in pair[0].placement:
            slots = sorted(entry for pipeline in pair for entry in _slots(pipeline, pipeline.placement.index(node)))
            rows[node] += [action for _, action in slots]
    return schedule_of_rows(problem, rows)


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


def _slots(pipeline: Pipeline, stage: int) -> list[tuple[int, Action]]:
    """(slot on the grid, action) of every forward and backward of one stage."""
    depth = pipeline.stages
    slots = []
    for m in range(pipeline.microbatches):
        unit, j = divmod(m, depth // 2)
        begin = 2 * depth * unit + 2 * j
        slots.append((begin + stage, Action(pipeline.name, stage, Kind.F, m)))
        slots.append((begin + 2 * depth - 1 - stage, Action(pipeline.name, stage, Kind.B, m)))
    return slots


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
