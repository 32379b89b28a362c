"""A run's calls on meshes of its machines: what each may choose from, where, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from placements.forward_options import generation_options, scoring_options
from placements.mesh import Mesh, MeshTree, aligned_meshes, hardware_on, split_meshes
from placements.problem import Call, MeshProblem, Option
from placements.run_work import RunWork
from placements.training_options import training_options

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.machines import Machines
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.machine import communicator_bytes, memory_limit
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.tasks.task import DESTINATIONS, SCORERS, TASKS, TRAINED

SOURCES = {task: f"{role}_train" for role, task in DESTINATIONS.items()}
SPLITS = 8  # two blocks divide the ranks at multiples of so large a part of them


@dataclass(frozen=True)
class RunProblem:
    """`problem` has options on all of `meshes`, the parts of these machines on which a call may run."""

    problem: MeshProblem
    machines: Machines
    meshes: tuple[Mesh, ...]

    @staticmethod
    def of(work: RunWork, machines: Machines, told: Callable[[str], None] = lambda what: None) -> RunProblem:
        """Prices all calls of a run; `told` hears what is priced. Raises InputError for a call without any option."""
        meshes, least = run_meshes(machines), least_mesh(machines)
        roles = {f"{role}_inference" for role in work.config.scorers()}
        scorers = tuple(task for task in SCORERS if task in roles)
        trainings = tuple(f"{role}_train" for role in work.config.trained())
        pricer = _Pricer(work, machines, forwards=1 + len(scorers))
        phases = []
        for phase in (("generation",), scorers, tuple(task for task in reversed(TRAINED) if task in trainings)):
            calls = []
            for task in phase:
                told(task)
                calls.append(Call(task, pricer.options(task, meshes), SOURCES.get(task, "")))
            phases += [tuple(calls)] if calls else []
        return RunProblem(MeshProblem(pricer.memory_bytes, least, tuple(phases)), machines, meshes)

    @property
    def whole(self) -> Mesh:
        return Mesh(0, self.machines.ranks)

    @cached_property
    def aligned(self) -> MeshTree:
        return aligned_meshes(self.machines.ranks, self.problem.least)

    @cached_property
    def splits(self) -> tuple[MeshTree, ...]:
        """The ranks in two blocks, and what these are made of."""
        ranks, least = self.machines.ranks, self.problem.least
        return tuple(split_meshes(ranks, left, least) for left in split_points(self.machines))


def node_ranks(machines: Machines) -> int:
    """Ranks of one machine, or of the part of one that there is."""
    return min(machines.whole().devices_per_node, machines.ranks)


def least_mesh(machines: Machines) -> int:
    """Ranks of half a machine."""
    return max(1, node_ranks(machines) // 2)


def split_points(machines: Machines) -> list[int]:
    """Ranks of the first of two blocks: of whole machines, or half of option."""
    ranks, node = machines.ranks, node_ranks(machines)
    if ranks == node:
        return [ranks // 2] if ranks % 2 == 0 else []
    step = -(-ranks // SPLITS // node) * node
    return list(range(step, ranks, step))


def run_meshes(machines: Machines) -> tuple[Mesh, ...]:
    """Meshes of the sizes of aligned ones and of two blocks, wherever they are whole machines, or within one: then
    ranks share no machine's links with ranks of another mesh but those of its other half."""
    ranks, node, least = machines.ranks, node_ranks(machines), least_mesh(machines)
    sizes = {mesh.size for mesh in aligned_meshes(ranks, least).meshes()}
    sizes |= {size for left in split_points(machines) for size in (left, ranks - left)}
    meshes = set(aligned_meshes(ranks, least).meshes())
    for size in sizes:
        for first in range(0, ranks - size + 1, least):
            within = size <= node and first % size == 0
            whole = first % node == 0 and (size % node == 0 or first + size == ranks)
            if within or whole:
                meshes.add(Mesh(first, size))
    return tuple(sorted(meshes))


def leanest_fastest(options: Iterable[Option], loose: bool) -> tuple[Option, ...]:
    """Without those that another is at least as fast as, and as lean: all the time, and while it runs.

    With `loose` layouts that a call of fixed weights may share (no pipeline) are held to others of the same layout
    alone: what is lost in seconds may be won where no weights are fetched.
    """
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds + o.fetch_seconds, o.held_bytes + o.passing_bytes, str(o))):
        alike = (other for other in kept if not (loose and option.layout.pp == 1) or other.layout == option.layout)
        if not any(
            other.seconds + other.fetch_seconds <= option.seconds + option.fetch_seconds
            and other.held_bytes <= option.held_bytes
            and other.held_bytes + other.passing_bytes <= option.held_bytes + option.passing_bytes
            for other in alike
        ):
            kept.append(option)
    return tuple(kept)


class _Pricer:
    """Options by mesh; of equal meshes they are priced once. What rests on hosts is not counted, even on CPUs, where it
    shares the ranks' memory. parallel.headroom stays free, as in a search of layouts."""

    def __init__(self, work: RunWork, machines: Machines, forwards: int) -> None:
        """`forwards`: calls that are no training, for each of which a rank has a communicator at most."""
        self.work, self.machines = work, machines
        self._talks = machines.ranks > 1 and not work.config.trainer.share_gpu  # else through the host
        self._priced: dict[tuple[str, int, HardwareSpec], tuple[Option, ...]] = {}
        self.memory_bytes: tuple[float, ...] = ()
        for spec, count in machines.kinds:
            limit = memory_limit(work.config.trainer, spec, machines.ranks, work.run.host)[0]
            limit *= 1 - work.config.parallel.headroom
            groups = (forwards + 1) * self._talks  # one more for weights on the move
            room = limit - spec.process_bytes - groups * spec.communicator_bytes
            self.memory_bytes += (room,) * count

    def options(self, task: str, meshes: Sequence[Mesh]) -> dict[Mesh, tuple[Option, ...]]:
        options = {}
        for mesh in meshes:
            hardware = hardware_on(self.machines, mesh)
            key = task, mesh.size, hardware
            if key not in self._priced:
                self._priced[key] = leanest_fastest(self._fitting(task, mesh, hardware), loose=True)
            options[mesh] = self._priced[key]
        if not any(options.values()):
            room = readable_bytes(max(self.memory_bytes))
            raise InputError(
                f"{task} of {self.machines.ranks} ranks of {self.machines.text}: no layout cuts the model and fits "
                f"into the {room} that a rank has for it; use more ranks or larger devices"
            )
        return options

    def _fitting(self, task: str, mesh: Mesh, hardware: HardwareSpec) -> Iterator[Option]:
        """With what a rank needs beside models: communicators of a training."""
        room = min(self.memory_bytes[mesh.first : mesh.last + 1])
        for option in self._all(task, mesh.size, hardware, room):
            held = option.held_bytes + (self._communicators(task, option.layout, hardware) if task in TRAINED else 0)
            if held + option.passing_bytes <= room:
                yield replace(option, held_bytes=held)

    def _communicators(self, task: str, layout: ParallelLayout, hardware: HardwareSpec) -> int:
        """Bytes of those of a model that trains, as a plan counts them; the group of all ranks, in which weights move,
        is no part."""
        if not self._talks or layout.size == 1:
            return 0
        role = TASKS[task].role
        run, ranks = self.work.run, rank_map({role: layout})
        held = communicator_bytes(hardware, {task: layout}, ranks, run.tied, run.norms_by_pipeline)
        return held - hardware.communicator_bytes * (layout.size == self.machines.ranks)

    def _all(self, task: str, ranks: int, hardware: HardwareSpec, room: float) -> Iterable[Option]:
        world = self.machines.ranks
        if task in TRAINED:
            return training_options(self.work, task, ranks, hardware, room)
        if task == "generation":
            return generation_options(self.work, ranks, hardware, world, room)
        return scoring_options(self.work, task, ranks, hardware, world, room)
