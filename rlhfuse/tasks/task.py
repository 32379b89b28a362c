"""One task of an iteration, and the table of those that models have: which role does what.

Layouts have the names of tasks in the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhfuse.base.parallel_layout import LayoutText, ParallelLayout
from rlhfuse.tasks.mesh import Mesh, MeshText
from rlhfuse.tasks.role import LEARNERS, POLICY, ROLES, Role, RoleName

Kind = Literal["generate", "score", "train", "move", "host", "meet"]
Unit = Literal["sample", "group", "minibatch", "batch"]


@dataclass(frozen=True)
class Take:
    """An input of a task: the `field` that the task `giver` gives, `lag` iterations before.

    `unit`: the part that must be complete before the taker begins on it. In the first `lag` iterations the input is
    whatever the run starts with, such as weights from files.
    """

    field: str
    giver: str
    unit: Unit = "batch"
    lag: int = 0

    def __str__(self) -> str:
        unit = f" by {self.unit}" if self.unit != "batch" else ""
        return f"{self.field} of {self.giver}{unit}" + (f", lag {self.lag}" if self.lag else "")


@dataclass(frozen=True)
class Task:
    """One row of an iteration.

    `worker`: 0 where all ranks of the mesh enter together; otherwise every `worker` ranks of it, in order, form a
    worker, which serves once all of them are free. `on_turn`: left out of some iterations, on all ranks alike. A `meet`
    comes last in its block. A `move` behind another task of its block goes on beneath it, on a communicator of its own.
    """

    name: str
    kind: Kind
    block: str
    mesh: MeshText
    worker: int = 0
    takes: tuple[Take, ...] = ()
    gives: tuple[str, ...] = ()
    on_turn: bool = False

    @property
    def training(self) -> bool:
        return self.kind == "train"

    @property
    def phase(self) -> int:
        """Order within the block: 0 for tasks that all ranks enter together, 1 for workers, 2 for meetings."""
        return 2 if self.kind == "meet" else 1 if self.worker else 0

    def faults(self, world_size: int) -> Iterator[str]:
        """Faults of the row itself."""
        if self.mesh[0] < 0 or self.mesh[-1] >= world_size:
            yield f"runs on ranks {self.mesh}, but there are ranks 0-{world_size - 1}"
        if self.worker and (self.worker < 0 or len(self.mesh) % self.worker):
            yield f"workers of {self.worker} ranks do not divide the {len(self.mesh)} ranks of its mesh"
        if self.worker and self.kind in ("generate", "move", "meet"):
            yield f"all ranks of a {self.kind} enter together; drop its workers"
        if len({*self.gives}) < len(self.gives):
            yield "gives a field twice"

    def fault_beside(self, other: Task) -> str:
        """The fault of this row together with an earlier one of its block, or ''."""
        if self.on_turn != other.on_turn:
            return f"runs in other iterations than {other.name} of its block"
        if self.phase != other.phase or {*self.mesh}.isdisjoint(other.mesh):
            return ""
        if self.mesh != other.mesh:  # nothing orders the two: ranks could enter them crosswise
            return f"shares some of its ranks with {other.name} of its block; share all or none"
        widths = sorted((self.worker, other.worker))
        return f"its workers cut across those of {other.name} of its block" if widths[1] % (widths[0] or 1) else ""

    def fault_taking(self, take: Take, giver: Task) -> str:
        """The fault of an input from another task of its block, or ''."""
        if self.phase == 0 or giver.phase == 2:
            return "of its own block, whose end it cannot wait for; put it in a later block"
        if self.phase == 1 and giver.kind == "move" and take.unit == "batch":
            return ""  # the move waits for no worker
        if self.phase == 1 and take.unit not in ("sample", "group"):
            return f"of its own block, where a worker waits for samples or groups, not for a {take.unit}"
        streams = giver.kind == "generate" or (giver.phase == 1 and giver.kind != "train")
        return "" if streams or self.phase == 2 else "of its own block, which gives nothing before its end"


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A task of the model `role`, which lies on `mesh` in this `layout`."""

    role: RoleName
    layout: LayoutText

    @staticmethod
    def of(name: str, layout: ParallelLayout, world_size: int) -> ModelTask:
        """The task of `TASKS` in this layout on all ranks, without what it takes and gives."""
        (role, kind), every = TASKS[name], Mesh.of_all(world_size)
        worker = layout.tp * layout.pp if kind == "score" else 0
        return ModelTask(name, kind, _BLOCKS[kind], every, worker, role=role, layout=layout)

    def faults(self, world_size: int) -> Iterator[str]:
        yield from super().faults(world_size)
        if self.layout.size != len(self.mesh):
            yield f"layout {self.layout} has {self.layout.size} ranks, its mesh {self.mesh} has {len(self.mesh)}"


class TaskKind(NamedTuple):
    """What the model of a role does."""

    role: Role
    kind: Literal["generate", "score", "train"]


TASKS: Mapping[str, TaskKind] = {  # by name, in the order of an iteration; a run has those of its roles
    "generation": TaskKind(POLICY, "generate"),
    **{f"{role}_inference": TaskKind(role, "score") for role in ROLES[1:]},
    **{f"{role}_train": TaskKind(role, "train") for role in LEARNERS},
}
_BLOCKS = {"generate": "gen_infer", "score": "gen_infer", "train": "train"}
SCORERS = tuple(name for name, task in TASKS.items() if task.kind == "score")
TRAINED = tuple(name for name, task in TASKS.items() if task.kind == "train")
# Role that trains -> the task that takes its weights; a scorer's copy goes on to host memory.
DESTINATIONS = {task.role: name for name, task in TASKS.items() if task.role.trains and task.kind != "train"}
BENEATH = tuple(name for name in DESTINATIONS.values() if name in SCORERS)  # whose weights move beneath generation
