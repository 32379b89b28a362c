"""The tasks of an iteration, as a table: which model does what. Layouts have their names in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rlhfuse.tasks.role import POLICY, Role, role_named


class TaskKind(NamedTuple):
    """What the model of a role does."""

    role: Role
    kind: Literal["generate", "score", "train"]


TASKS: Mapping[str, TaskKind] = {  # by name, in the order of an iteration; a run has those of its roles
    "generation": TaskKind(POLICY, "generate"),
    **{f"{name}_inference": TaskKind(role_named(name), "score") for name in ("reference", "reward", "critic")},
    **{f"{name}_train": TaskKind(role_named(name), "train") for name in ("actor", "critic")},
}
SCORERS = tuple(name for name, task in TASKS.items() if task.kind == "score")
TRAINED = tuple(name for name, task in TASKS.items() if task.kind == "train")
# Role that trains -> the task that takes its weights; a scorer's copy goes on to host memory.
DESTINATIONS = {task.role: name for name, task in TASKS.items() if task.role.trains and task.kind != "train"}
