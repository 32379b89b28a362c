"""The exact search over meshes against trying every plan, on clusters small enough for that."""

import random
from dataclasses import replace
from itertools import product

import pytest
from placements.exact_search import best_plan, mesh_kinds
from placements.mesh import Mesh, aligned_meshes, hardware_on, split_meshes
from placements.problem import Call, Choice, MeshProblem, Option
from placements.walk import greedy_plan, walk
from testkit.call_graph import GraphCall, graph_seconds, place_calls
from testkit.mesh_cases import PHASES, plans, random_problem
from testkit.profiles import share

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.hardware import known_hardware, machines_by_name

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


def test_meshes_are_of_a_kind_where_all_is_alike_in_their_parts():
    problem, tree = iteration(1, 8, 2, (1,), 8.0), aligned_meshes(8, 2)
    kinds = mesh_kinds(problem, tree)
    assert kinds[Mesh(0, 4)] == kinds[Mesh(4, 4)] and len(set(kinds.values())) == 3
    less = mesh_kinds(replace(problem, memory_bytes=(8.0,) * 7 + (7.0,)), tree)
    assert less[Mesh(0, 4)] != less[Mesh(4, 4)] and less[Mesh(4, 2)] == less[Mesh(0, 2)] != less[Mesh(6, 2)]
    copied = replace(problem.phases[0][0], options={m: list(some) for m, some in problem.phases[0][0].options.items()})
    assert mesh_kinds(replace(problem, phases=((copied,), *problem.phases[1:])), tree) == kinds
    other = replace(copied, options={**copied.options, Mesh(2, 2): []})
    assert len(set(mesh_kinds(replace(problem, phases=((other,), *problem.phases[1:])), tree).values())) == 5


@pytest.mark.parametrize("seed", range(share(5)))
def test_a_walk_is_never_worse_than_its_start_nor_better_than_the_best(seed):
    problem = iteration(seed, 8, 1, (1, 2), 9.0)
    meshes, found = aligned_meshes(8, 1).meshes(), best_plan(problem)
    walked = walk(problem, greedy_plan(problem, meshes), meshes, 2000, seed)
    assert not walked.fits or walked.seconds >= found.seconds
    from_best = walk(problem, found.plan, meshes, 300, seed)
    assert from_best.fits and from_best.seconds == found.seconds
    assert walk(problem, found.plan, meshes, 300, seed) == from_best


def test_aligned_meshes_nest():
    assert [str(mesh) for mesh in aligned_meshes(8, 2).meshes()] == "@0-7 @0-3 @0-1 @2-3 @4-7 @4-5 @6-7".split()
    assert [str(mesh) for mesh in aligned_meshes(6, 2).meshes()] == "@0-5 @0-3 @0-1 @2-3 @4-5".split()
    for one, other in product(aligned_meshes(24, 4).meshes(), repeat=2):
        assert one.holds(other) or other.holds(one) or not one.overlaps(other)
    assert Mesh(16, 8) in aligned_meshes(24, 4).meshes()


def option(layout, seconds, held=0.0, passing=0.0, fetch=0.0):
    return Option(ParallelLayout.parse(layout), seconds, held, passing, fetch)


def test_a_phase_in_its_best_order_and_what_weights_cost():
    """Left and right halves beside each other after what needs both, whichever was named first."""
    whole, left, right = Mesh(0, 8), Mesh(0, 4), Mesh(4, 4)
    half, both = [option("d4t1p1", 3)], [option("d8t1p1", 2), option("d4t2p1", 2)]
    calls = [Call(name, {left: half, right: half, whole: both}) for name in ("left", "both", "right")]
    train = Call("train", {whole: [option("d8t1p1", 5, held=1)]})
    generate = Call("generate", {whole: [option("d8t1p1", 2, fetch=1), option("d4t2p1", 2, fetch=1)]}, "train")
    problem = MeshProblem((10.0,) * 8, 4, ((generate,), tuple(calls), (train,)))
    plan = {"left": Choice(left, half[0]), "both": Choice(whole, both[0]), "right": Choice(right, half[0])}
    plan |= {call.name: Choice(whole, call.options[whole][0]) for call in (train, generate)}
    assert problem.seconds(plan) == 2 + (2 + 3) + 5
    fetched = plan | {"generate": Choice(whole, generate.options[whole][1])}  # another layout
    assert problem.seconds(fetched) == 13
    with pytest.raises(InputError, match=r"call generate takes weights from 'nobody'; sources are \['train'\]"):
        MeshProblem((1.0,) * 8, 4, ((Call("generate", {}, "nobody"), train),))


def test_calls_share_devices_and_wait_for_parents():
    """Two halves run side by side; a call on both waits for both (REAL, Algorithm 1)."""
    tree = (("gen", (1, 2), 10), ("left", (1, 1), 3, ("gen",)), ("right", (2, 2), 5, ("gen",)))
    calls = [GraphCall(*one) for one in (*tree, ("more", (1, 1), 1, ("gen",)), ("both", (1, 2), 2, ("left",)))]
    expected = {"gen": (0, 10), "left": (10, 13), "right": (10, 15), "more": (13, 14), "both": (15, 17)}
    assert place_calls(calls) == expected and graph_seconds(calls) == 17
    with pytest.raises(InputError, match="a, b wait for one another"):
        place_calls((GraphCall("a", (1, 1), 1.0, ("b",)), GraphCall("b", (1, 1), 1.0, ("a",))))


def test_a_mesh_has_the_kinds_of_its_own_ranks():
    machines, known = machines_by_name("a100:8,h200:16", ranks=24), known_hardware()
    assert hardware_on(machines, Mesh(0, 8)) == known["a100"]
    assert hardware_on(machines, Mesh(8, 16)) == known["h200"] == hardware_on(machines, Mesh(12, 4))
    assert hardware_on(machines, Mesh(0, 16)).name == "a100:8,h200:8"
