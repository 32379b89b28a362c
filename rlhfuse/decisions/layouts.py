"""The task table: which of up to six tasks runs in which layout, and the layouts that a task may have."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import LayoutText, ParallelLayout
from rlhfuse.config.auto_layouts import layout_rows
from rlhfuse.config.settings import ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.tasks.role import Role, role_named
from rlhfuse.tasks.task import TASKS, TRAINED

RoleName = Annotated[Role, PlainValidator(role_named), PlainSerializer(str)]  # in JSON


@dataclass(frozen=True)
class Task:
    """One row: the task, the model's role, the layout, and its first and last rank."""

    name: str
    role: RoleName
    layout: LayoutText
    ranks: tuple[int, int]

    @property
    def training(self) -> bool:
        return self.name in TRAINED

    def __str__(self) -> str:
        return f"{self.name:20s} {self.role:10s} {str(self.layout):10s} ranks {self.ranks[0]}-{self.ranks[1]}"


def given_tasks(parallel: ParallelConfig, roles: Collection[Role], world_size: int) -> tuple[Task, ...]:
    """The rows of models of these `roles` that are not auto, unchecked."""
    every = (0, world_size - 1)
    texts = {name: getattr(parallel, name) for name, task in TASKS.items() if task.role in roles}
    return tuple(
        Task(name, TASKS[name].role, ParallelLayout.parse(text), every) for name, text in texts.items() if text != AUTO
    )


def training_layouts(tasks: tuple[Task, ...]) -> dict[str, ParallelLayout]:
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


def fits_model(layout: ParallelLayout, spec: ModelSpec) -> bool:
    """Whether the model can be laid out so."""
    try:
        spec.check_layout(layout, "")
    except InputError:
        return False
    return True


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
