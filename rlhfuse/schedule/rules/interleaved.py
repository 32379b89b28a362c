"""Interleaved 1F1B (Megatron's virtual stages): a pipeline runs over its nodes v times, with stages 1/v as long.

Node n of N holds the chunks n, N + n, 2N + n, ...; micro-batches run in groups of N, a group through one chunk after
the other (backwards from the last chunk to the first). With equal stages the bubble falls from (N-1)/(N-1+M) to
(N-1)/(N-1+vM). Paper: section 2.2, Figure 3 (bottom).
"""

from __future__ import annotations

from dataclasses import replace

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import tidy
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import by_model, check_single_visits, one_forward_one_backward, schedule_of_rows


def interleaved_1f1b(problem: FusionProblem) -> Schedule:
    """Megatron's order of interleaved pipelines, models one after the other as in serial 1F1B.

    Valid under any times and lags. Raises InputError naming a pipeline that does not run over its nodes
    at least twice in the same order, and one whose micro-batches are no multiple of its nodes.
    """
    rows: list[list[Action]] = [[] for _ in range(problem.nodes)]
    for pipeline in by_model(problem):
        nodes, chunks = _rounds(pipeline)
        groups = [range(g, g + nodes) for g in range(0, pipeline.microbatches, nodes)]
        for n in range(nodes):
            visits = [chunk * nodes + n for chunk in range(chunks)]
            forwards = [Action(pipeline.name, s, Kind.F, m) for group in groups for s in visits for m in group]
            backwards = [Action(pipeline.name, s, Kind.B, m) for group in groups for s in visits[::-1] for m in group]
            warm_up = 2 * (nodes - n - 1) + (chunks - 1) * nodes
            rows[pipeline.placement[n]] += one_forward_one_backward(forwards, backwards, warm_up)
    return schedule_of_rows(problem, rows)


def interleaved_problem(problem: FusionProblem, chunks: int) -> FusionProblem:
    """Every stage cut into `chunks` equal ones, so that a pipeline visits each of its nodes `chunks` times.

    Times and activations are divided, weights stay where they were. Raises InputError on fewer than two
    chunks and on a pipeline that visits a node twice already.
    """
    if type(chunks) is not int or chunks < 2:
        raise InputError(f"chunks is {chunks!r}; interleaving needs an integer of at least 2")
    return replace(problem, pipelines=tuple(_divided(pipeline, chunks) for pipeline in problem.pipelines))


def _divided(pipeline: Pipeline, chunks: int) -> Pipeline:
    check_single_visits(pipeline, "interleaved 1F1B")

    def divided(values: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(tidy(value / chunks) for value in values) * chunks

    return pipeline.with_facts(divided, divided, placement=pipeline.placement * chunks)


def _rounds(pipeline: Pipeline) -> tuple[int, int]:
    """(nodes, times that the pipeline runs over them)."""
    nodes = len(set(pipeline.placement))
    chunks = pipeline.stages // nodes
    if chunks < 2 or pipeline.placement != pipeline.placement[:nodes] * chunks:
        raise InputError(
            f"interleaved 1F1B: pipeline {pipeline.name} with placement {list(pipeline.placement)} does not run over "
            "its nodes twice or more in one order; make the problem with interleaved_problem"
        )
    if pipeline.microbatches % nodes:
        raise InputError(
            f"interleaved 1F1B: pipeline {pipeline.name} has {pipeline.microbatches} micro-batches on {nodes} nodes, "
            f"{pipeline.microbatches} % {nodes} = {pipeline.microbatches % nodes}, must be 0"
        )
    return nodes, chunks
