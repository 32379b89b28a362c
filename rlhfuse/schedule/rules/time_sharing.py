"""PUZZLE's time-sharing: the next model's 1F1B begins while the one before it drains (PUZZLE 4.2, Figure 5).

All models have one layout and one direction; the order is 1F1B over the micro-batches of all models in a row, so that
stage s never holds more than P - s of them. With equal stages and M >= P micro-batches of each model the makespan is
M sum_k(f_k + b_k) + (P - 1) max_k(f_k + b_k).
"""

from __future__ import annotations

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import by_model, check_single_visits, one_forward_one_backward, schedule_of_rows


def time_sharing(problem: FusionProblem) -> Schedule:
    """1F1B over the micro-batches of all models in a row, in order of the models' appearance.

    Valid under any times and lags. Raises InputError naming a pipeline that shares nodes with another of a
    different placement, and one that visits a node twice.
    """
    rows: list[list[Action]] = [[] for _ in range(problem.nodes)]
    for placement, sharers in _sharers(problem).items():
        sequence = [(pipeline.name, m) for pipeline in sharers for m in range(pipeline.microbatches)]
        for stage, node in enumerate(placement):
            forwards = [Action(name, stage, Kind.F, m) for name, m in sequence]
            backwards = [Action(name, stage, Kind.B, m) for name, m in sequence]
            rows[node] = one_forward_one_backward(forwards, backwards, len(placement) - stage - 1)
    return schedule_of_rows(problem, rows)


def _sharers(problem: FusionProblem) -> dict[tuple[int, ...], list[Pipeline]]:
    """Pipelines by placement; no node is in two placements."""
    sharers: dict[tuple[int, ...], list[Pipeline]] = {}
    owner: dict[int, Pipeline] = {}
    for pipeline in by_model(problem):
        check_single_visits(pipeline, "time-sharing")
        for node in pipeline.placement:
            other = owner.setdefault(node, pipeline)
            if other.placement != pipeline.placement:
                raise InputError(
                    f"time-sharing: pipelines {other.name} and {pipeline.name} share node {node} but run over "
                    f"{list(other.placement)} and {list(pipeline.placement)}; one layout is needed"
                )
        sharers.setdefault(pipeline.placement, []).append(pipeline)
    return sharers
