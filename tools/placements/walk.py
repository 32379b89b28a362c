"""ReaLHF's search (5.2): a random walk over placements of all calls, each step one call elsewhere or in another layout.

A plan's energy is its seconds, times PENALTY where it does not fit; a step to more energy is taken with probability
exp(-difference / temperature). The paper prints neither its temperature nor its penalty.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from placements.mesh import Mesh
from placements.problem import MeshPlan, MeshProblem

PENALTY = 100.0
TEMPERATURE = 0.02  # of the energy of the best plan so far


@dataclass(frozen=True)
class Walked:
    """Where a walk came: the plan of least energy that it saw."""

    plan: MeshPlan
    seconds: float
    fits: bool
    accepted: int


def greedy_plan(problem: MeshProblem, meshes: Sequence[Mesh]) -> MeshPlan:
    """ReaLHF's start: every call as if it were alone, wherever it is fastest; it may not fit."""
    plan = {}
    for call in problem.calls.values():
        plan[call.name] = min(call.choices(*meshes), key=lambda choice: choice.option.seconds)
    return plan


def walk(problem: MeshProblem, start: MeshPlan, meshes: Sequence[Mesh], steps: int, seed: int) -> Walked:
    """So many steps from `start` over placements on `meshes`; nothing worse than the start comes back."""
    generator, names = random.Random(seed), list(problem.calls)
    choices = {name: problem.calls[name].choices(*meshes) for name in names}
    plan = dict(start)
    energy = least = _energy(problem, plan)
    best, accepted = dict(plan), 0
    for _ in range(steps):
        name = generator.choice(names)
        before, plan[name] = plan[name], generator.choice(choices[name])
        new = _energy(problem, plan)
        if new > energy and generator.random() >= exp((energy - new) / (TEMPERATURE * least)):
            plan[name] = before
            continue
        energy, accepted = new, accepted + 1
        if energy < least:
            best, least = dict(plan), energy
    return Walked(best, problem.seconds(best), problem.fits(best), accepted)


def _energy(problem: MeshProblem, plan: MeshPlan) -> float:
    return problem.seconds(plan) * (1 if problem.fits(plan) else PENALTY)
