"""1F1B+: both models with half the pipeline depth and twice the replicas, then 1F1B one after the other.

Two consecutive stages are merged on one node, so the pipeline that covered P nodes becomes two replicas
of P/2 stages, each with half of the micro-batches:

    nodes     0   1   2   3            nodes     0    1      2    3
    actor     s0  s1  s2  s3   M   ->  actor.0   s0+1 s2+3              M/2
                                       actor.1             s0+1 s2+3    M/2

The bubbles are shorter and the weights of a node twice as many. With equal stages and M micro-batches the
time of a model falls from (M + P - 1)(f + b) to (M/2 + P/2 - 1) 2(f + b).

Knows nothing of layouts. Paper: section 7.3 and Table 3, column 1F1B+ (the closed form is not stated there).
"""

from __future__ import annotations

from dataclasses import replace

from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.rules.fixed_order import by_model, check_single_visits


def halved_1f1b(problem: FusionProblem) -> Schedule:
    """1F1B+ of `problem`: serial 1F1B of `halved_problem(problem)`. Raises InputError as that does."""
    return serial_1f1b(halved_problem(problem))


def halved_problem(problem: FusionProblem) -> FusionProblem:
    """`problem` with half the depth and twice the replicas, called model.0, model.1, ...

    Times and activations of merged stages add up. Static memory doubles: that sharding over more replicas
    takes some of it back is not regarded. Raises InputError with the arithmetic when stages or micro-batches
    are odd, when a pipeline visits a node twice, and when static memory differs between nodes.
    """
    pipelines: list[Pipeline] = []
    for pipeline in by_model(problem):
        replicas = sum(other.model == pipeline.model for other in pipelines)
        pipelines += _halves(pipeline, replicas)
    return replace(problem, pipelines=tuple(pipelines), static_memory=_doubled(problem.static_memory))


def _halves(pipeline: Pipeline, first: int) -> list[Pipeline]:
    check_single_visits(pipeline, "1F1B+")
    for what, count in (("stages", pipeline.stages), ("micro-batches", pipeline.microbatches)):
        if count % 2:
            raise InputError(
                f"1F1B+: pipeline {pipeline.name} has {count} {what}, {count} % 2 = 1, must be 0 to halve them"
            )

    def merged(values: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(a + b for a, b in zip(values[::2], values[1::2]))

    depth = pipeline.stages // 2
    return [
        Pipeline(
            name=f"{pipeline.model}.{first + half}",
            model=pipeline.model,
            placement=pipeline.placement[half * depth : (half + 1) * depth],
            microbatches=pipeline.microbatches // 2,
            forward=merged(pipeline.forward),
            backward=merged(pipeline.backward),
            activation=merged(pipeline.activation),
            weight_gradient=None if pipeline.weight_gradient is None else merged(pipeline.weight_gradient),
        )
        for half in (0, 1)
    ]


def _doubled(static: Number | tuple[Number, ...]) -> Number | tuple[Number, ...]:
    if not isinstance(static, tuple):
        return 2 * static
    if len(set(static)) > 1:
        raise InputError(
            f"1F1B+: static_memory {list(static)} differs between nodes, so that of two merged stages is unknown; "
            "give one number"
        )
    return tuple(2 * entry for entry in static)
