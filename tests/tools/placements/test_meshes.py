"""The exact search over meshes against trying every plan, on clusters small enough for that."""

import random
from dataclasses import replace
from itertools import product

import pytest
from placements.exact_search import best_plan
from placements.mesh import Mesh, aligned_meshes, split_meshes
from placements.problem import MeshProblem
from testkit.mesh_cases import PHASES, plans, random_problem
from testkit.profiles import share

from rlhfuse.base.errors import InputError

TWO_SCORERS = (PHASES[0], ("reference_inference", "critic_inference"), PHASES[2])


def iteration(seed, ranks, least, degrees, memory, phases=TWO_SCORERS):
    return random_problem(seed, [aligned_meshes(ranks, least).meshes()], (memory,) * ranks, least, degrees, phases)


def check_best(problem, tree=None):
    """Against all plans; without any that fits it is refused."""
    meshes = (tree or aligned_meshes(problem.ranks, problem.least)).meshes()
    expected = min(map(problem.seconds, plans(problem, meshes)), default=None)
    if expected is None:
        with pytest.raises(InputError, match=f"on {problem.ranks} ranks fits into .* of a rank"):
            best_plan(problem, tree)
        return
    found = best_plan(problem, tree)
    assert problem.fits(found.plan) and problem.seconds(found.plan) == found.seconds == expected
    assert found.bound >= found.seconds and found.priced <= found.placements


@pytest.mark.parametrize("seed", range(share(10)))
@pytest.mark.parametrize(
    "ranks, least, degrees, phases",
    [
        (4, 2, (1, 2), TWO_SCORERS),
        (4, 1, (1,), TWO_SCORERS),
        (6, 2, (1,), TWO_SCORERS),
        (8, 4, (1, 2), TWO_SCORERS),
        (4, 2, (1,), PHASES),
        (4, 2, (1,), (PHASES[0], PHASES[1][:2], ("actor_train",))),
    ],
)
def test_no_plan_is_faster(ranks, least, degrees, phases, seed):
    check_best(iteration(seed, ranks, least, degrees, 4.0 + seed % 7, phases))


def unlike(seed, ranks, least, degrees):
    """The same iteration where ranks of the left half have other memory, and meshes there other options."""
    generator = random.Random(seed)
    problem = iteration(seed, ranks, least, degrees, 0.0)
    left = Mesh(0, ranks // 2)

    def slower(some):
        factor = generator.choice((1.0, 2.0, 3.0))
        return [replace(one, seconds=one.seconds * factor, passing_bytes=one.passing_bytes + 1) for one in some]

    def moved(call):
        kinds = {mesh: slower(some) if mesh.overlaps(left) else some for mesh, some in call.options.items()}
        missing = generator.choice([None, *kinds])
        return replace(call, options={mesh: some for mesh, some in kinds.items() if mesh != missing})

    phases = tuple(tuple(map(moved, phase)) for phase in problem.phases)
    memory = [generator.randint(6, 10)] * (ranks // 2) + [generator.randint(4, 12) for _ in range(ranks // 2)]
    return MeshProblem(tuple(map(float, memory)), least, phases)


@pytest.mark.parametrize("seed", range(share(20)))
@pytest.mark.parametrize("ranks, least, degrees", [(4, 2, (1, 2)), (4, 1, (1,)), (8, 4, (1, 2))])
def test_no_plan_is_faster_where_ranks_differ(ranks, least, degrees, seed):
    check_best(unlike(seed, ranks, least, degrees))


@pytest.mark.parametrize("seed", range(share(10)))
def test_no_plan_is_faster_on_two_parts(seed):
    tree = split_meshes(6, 2, 2)
    assert [str(mesh) for mesh in tree.meshes()] == "@0-5 @0-1 @2-5 @2-3 @4-5".split()
    check_best(random_problem(seed, [tree.meshes()], (9.0,) * 6, 2, phases=TWO_SCORERS), tree)


def test_aligned_meshes_nest():
    assert [str(mesh) for mesh in aligned_meshes(8, 2).meshes()] == "@0-7 @0-3 @0-1 @2-3 @4-7 @4-5 @6-7".split()
    assert [str(mesh) for mesh in aligned_meshes(6, 2).meshes()] == "@0-5 @0-3 @0-1 @2-3 @4-5".split()
    for one, other in product(aligned_meshes(24, 4).meshes(), repeat=2):
        assert one.holds(other) or other.holds(one) or not one.overlaps(other)
    assert Mesh(16, 8) in aligned_meshes(24, 4).meshes()
