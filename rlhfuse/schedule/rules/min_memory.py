"""The least memory that any schedule needs on each node, and a schedule that needs no more.

Before the last stage of a pipeline runs a micro-batch's backward, all its stages have run the forward
and none has released it, so a node holds the activations of all stages it has of that pipeline. One
micro-batch at a time, of one pipeline at a time, holds no more than that:

    needed on a node  =  max over pipelines of  sum over its stages there of activation

Knows nothing of search.
"""

from __future__ import annotations

from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import tidy
from rlhfuse.schedule.ir.objective import loosen
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule


def needed_memory(problem: FusionProblem) -> tuple[Number, ...]:
    """Activation memory of each node without which no schedule exists, and with which one does."""
    needed = [0.0] * problem.nodes
    for pipeline in problem.pipelines:
        held = [0.0] * problem.nodes
        for node, activation in zip(pipeline.placement, pipeline.activation):
            held[node] += activation
        needed = [max(pair) for pair in zip(needed, held)]
    return tuple(tidy(value) for value in needed)


def check_caps(problem: FusionProblem) -> None:
    """Raise InputError, with the smallest cap that would do, unless some schedule fits."""
    needed = needed_memory(problem)
    short = [node for node, least in enumerate(needed) if least > loosen(problem.node_cap(node))]
    if not short:
        return
    node = max(short, key=lambda node: needed[node] - problem.node_cap(node))
    static = problem.static_memory[node] if isinstance(problem.static_memory, tuple) else problem.static_memory
    there = " there" if isinstance(problem.memory_cap, tuple) else ""
    raise InputError(
        f"memory_cap leaves {tidy(problem.node_cap(node))} for activations on node {node}, but one micro-batch at a "
        f"time needs {needed[node]}; the smallest feasible cap{there} is {tidy(needed[node] + static)}"
    )


def one_at_a_time(problem: FusionProblem) -> Schedule:
    """Every micro-batch alone: down its pipeline and up again before the next one begins."""
    orders: list[list[Action]] = [[] for _ in range(problem.nodes)]
    for pipeline in problem.pipelines:
        for microbatch in range(pipeline.microbatches):
            for stage, node in enumerate(pipeline.placement):
                orders[node].append(Action(pipeline.name, stage, Kind.F, microbatch))
            for stage, node in reversed(list(enumerate(pipeline.placement))):
                for kind in (Kind.B, Kind.W) if pipeline.split else (Kind.B,):
                    orders[node].append(Action(pipeline.name, stage, kind, microbatch))
    return Schedule(problem, tuple(tuple(order) for order in orders))
