"""The layouts that tasks are given, and those that a task may have."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import layout_rows
from rlhfuse.config.settings import ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import TASKS, TRAINED, ModelTask


def given_tasks(parallel: ParallelConfig, roles: Collection[Role], world_size: int) -> tuple[ModelTask, ...]:
    """The rows of models of these `roles` that are not auto, unchecked."""
    texts = {name: getattr(parallel, name) for name, task in TASKS.items() if task.role in roles}
    given = {name: ParallelLayout.parse(text) for name, text in texts.items() if text != AUTO}
    return tuple(ModelTask.of(name, layout, world_size) for name, layout in given.items())


def training_layouts(tasks: tuple[ModelTask, ...]) -> dict[str, ParallelLayout]:
    """Layout of each model that trains, the policy first: what a fused group is made of."""
    return {task.role: task.layout for task in tasks if task.training}


def planned_world_size(config: RunConfig, given: int | None, job: Mapping[str, str] = os.environ) -> int:
    """Ranks to plan for: as given, else WORLD_SIZE of `job`, else as a layout says, parallel.actor_train's first.

    Raises InputError, also where all layouts are auto.
    """
    if given is not None:
        if given < 1:
            raise InputError(f"--world-size {given} ranks run nothing; give 1 or more")
        return given
    text = job.get("WORLD_SIZE", "")
    if not text:
        layouts = (getattr(config.parallel, row) for row in (TRAINED[0], *layout_rows(config)))
        if (layout := next((layout for layout in layouts if layout != AUTO), None)) is None:
            fix = "start under torchrun, which says how many, or give a layout or --world-size"
            raise InputError(f"parallel.actor_train=auto: the number of ranks is not known; {fix}")
        return ParallelLayout.parse(layout).size
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"WORLD_SIZE={text!r} is no number of ranks; unset it or give --world-size")
    return int(text)


def possible_layouts(
    spec: ModelSpec, ranks: int, devices_per_node: int, most_replicas: int, chunks: Sequence[int] = ()
) -> Iterator[ParallelLayout]:
    """Layouts of a model over so many ranks that its shape allows: whole tensor groups in a node, at most so many
    replicas, and pipelines with any of these numbers of virtual stages; none: no pipelines."""
    for tp in divisors(ranks):
        if devices_per_node % tp:
            continue
        for pp in divisors(ranks // tp) if chunks else (1,):
            for count in chunks if pp > 1 else (1,):
                layout = ParallelLayout(ranks // (tp * pp), tp, pp, chunks=count)
                if layout.dp <= most_replicas and fits_model(layout, spec):
                    yield layout


def widest_layout(spec: ModelSpec, ranks: int, most: int) -> ParallelLayout:
    """Without a pipeline, of the largest tensor degree that divides `most` and that the model's shape allows."""
    every = (ParallelLayout(ranks // tp, tp, 1) for tp in reversed(divisors(most)))
    return next(layout for layout in every if fits_model(layout, spec))


def fits_model(layout: ParallelLayout, spec: ModelSpec) -> bool:
    """Whether the model can be laid out so."""
    try:
        spec.check_layout(layout, "")
    except InputError:
        return False
    return True


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
