"""Orders written down without a clock: the 1F1B pattern over lists of forwards and backwards.

    forwards  a b c d, backwards a b c d, two forwards first:    aF bF | cF aB | dF bB | cB dB

Such an order depends on micro-batch counts alone, so it stays valid under any times and lags. With a
split backward every W stands right behind its B: the activation is released as early as possible.

Knows nothing of times, and of no schedule in particular.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule


def one_forward_one_backward(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += [forward, backward]
    return row + list(backwards[len(forwards) - warm_up :])


def schedule_of_rows(problem: FusionProblem, rows: Sequence[Iterable[Action]]) -> Schedule:
    """The schedule of rows of F and B, one row per node; each W is put behind its B."""
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
