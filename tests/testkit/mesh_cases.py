"""Mesh problems of an iteration with random options, and every plan of one."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from placements.mesh import Mesh
from placements.problem import Call, MeshPlan, MeshProblem, Option
from placements.run_problem import SOURCES, RunProblem
from placements.run_work import RunWork

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.hardware import machines_by_name
from rlhfuse.planning.candidate import Candidate

PHASES = (
    ("generation",),
    ("reference_inference", "reward_inference", "critic_inference"),
    ("critic_train", "actor_train"),
)


def work_of(draft: Candidate) -> RunWork:
    """What a drafted run does."""
    asked = {"sequence_parallel": draft.run.given.parallel.sequence_parallel}
    inputs = replace(draft.inputs, measured=None)
    return RunWork(draft.run.with_config(draft.run.config.with_(parallel=asked)), inputs)


def run_problem_of(draft: Candidate) -> RunProblem:
    trainer = draft.config.trainer
    return RunProblem.of(work_of(draft), machines_by_name(trainer.hardware, trainer.device, draft.run.world_size))


def random_problem(
    seed: int,
    groups: Sequence[Sequence[Mesh]],
    memory: tuple[float, ...],
    least: int,
    degrees: tuple[int, ...] = (1,),
    phases: tuple[tuple[str, ...], ...] = PHASES,
) -> MeshProblem:
    """Whole numbers, so that ties and exact fits come about; meshes of a group and a size have the same options."""
    generator = random.Random(seed)

    def option(name: str, size: int, tp: int) -> Option:
        held = generator.randint(1, 4) if name.endswith("_train") else 0
        fetch = generator.randint(0, 3) if name in SOURCES else 0
        seconds = generator.randint(4, 40) * 8 // size
        return Option(ParallelLayout(size // tp, tp, 1), seconds, held, generator.randint(1, 6), fetch)

    def call(name: str) -> Call:
        options = {}
        for meshes in groups:
            sizes = sorted({mesh.size for mesh in meshes})
            by_size = {size: [option(name, size, tp) for tp in degrees if size % tp == 0] for size in sizes}
            options |= {mesh: by_size[mesh.size] for mesh in meshes}
        return Call(name, options, SOURCES.get(name, ""))

    return MeshProblem(memory, least, tuple(tuple(map(call, phase)) for phase in phases))


def plans(problem: MeshProblem, meshes: Sequence[Mesh]) -> Iterator[MeshPlan]:
    """Every plan on these meshes that fits."""
    every = [call.choices(*meshes) for call in problem.calls.values()]
    for chosen in product(*every):
        plan = dict(zip(problem.calls, chosen))
        if problem.fits(plan):
            yield plan
