"""The exact search over meshes against trying every plan, on clusters small enough for that."""

import random
from dataclasses import replace
from itertools import product

import pytest
from testkit.profiles import share

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ParallelLayout
from rlhfuse.planning.meshes.call_graph import GraphCall, graph_seconds, place_calls
from rlhfuse.planning.meshes.mesh import Mesh, aligned_meshes, split_meshes
from rlhfuse.planning.meshes.problem import Call, Choice, MeshProblem, Option, on_equal_meshes
from rlhfuse.planning.meshes.search import best_plan, mesh_kinds
from rlhfuse.planning.meshes.walk import greedy_plan, walk


def options(generator, size, layouts, held, fetched):
    """Random ones: whole numbers, so that ties and exact fits come about."""
    degrees = [tp for tp in (1, 2, 4) if size % tp == 0][:layouts]
    return [
        Option(
            ParallelLayout(size // tp, tp, 1),
            seconds=float(generator.randint(4, 40) * 8 // size),
            held_bytes=float(generator.randint(1, 4)) if held else 0.0,
            passing_bytes=float(generator.randint(1, 6)),
            fetch_seconds=float(generator.randint(0, 3)) if fetched else 0.0,
        )
        for tp in degrees
    ]


def call(name, generator, meshes, layouts, held=False, source=""):
    """The same options for all meshes of a size."""
    sizes = sorted({mesh.size for mesh in meshes})
    by_size = {size: options(generator, size, layouts, held, bool(source)) for size in sizes}
    return Call(name, on_equal_meshes(meshes, by_size), source)


def iteration(seed, ranks, least, layouts, memory, scorers=("reference", "critic")):
    """Generation, scorers and two trainings: the actor's weights are fetched to generate, the critic's to score."""
    generator = random.Random(seed)
    some = (generator, aligned_meshes(ranks, least).meshes(), layouts)
    phases = (
        (call("generation", *some, source="actor_train"),),
        tuple(call(name, *some, source="critic_train" if name == "critic" else "") for name in scorers),
        (call("critic_train", *some, held=True), call("actor_train", *some, held=True)),
    )
    return MeshProblem((memory,) * ranks, least, phases)


def least_of_all(problem, tree=None):
    """Seconds of the fastest plan, by trying all of them; None where none fits."""
    meshes = (tree or aligned_meshes(problem.ranks, problem.least)).meshes()
    every = [
        [Choice(mesh, one) for mesh in meshes for one in call.options.get(mesh, ())] for call in problem.calls.values()
    ]
    plans = (dict(zip(problem.calls, chosen)) for chosen in product(*every))
    return min((problem.seconds(plan) for plan in plans if problem.fits(plan)), default=None)


def check_best(problem):
    """Against all plans; without any that fits it is refused."""
    expected = least_of_all(problem)
    if expected is None:
        with pytest.raises(InputError, match=f"on {problem.ranks} ranks fits into .* GB of a rank"):
            best_plan(problem)
        return
    found = best_plan(problem)
    assert problem.fits(found.plan) and problem.seconds(found.plan) == found.seconds == expected
    assert found.bound >= found.seconds and found.priced <= found.placements
    assert graph_seconds(problem.graph(found.plan)) == pytest.approx(found.seconds)


@pytest.mark.parametrize("seed", range(share(10)))
@pytest.mark.parametrize("ranks, least, layouts", [(4, 2, 2), (4, 1, 1), (6, 2, 1), (8, 4, 2)])
def test_no_plan_is_faster(ranks, least, layouts, seed):
    check_best(iteration(seed, ranks, least, layouts, memory=4.0 + seed % 7))


@pytest.mark.parametrize("seed", range(share(5)))
def test_three_scorers_and_no_critic(seed):
    problem = iteration(seed, 4, 2, 1, 8.0, ("reference", "reward", "critic"))
    check_best(problem)
    generation, scorers, (_, actor) = problem.phases
    check_best(MeshProblem((8.0,) * 4, 2, (generation, scorers[:2], (actor,))))


def unlike(seed, ranks, least, layouts):
    """The same iteration where ranks of the left half have other memory, and meshes there other options."""
    generator = random.Random(seed)
    problem = iteration(seed, ranks, least, layouts, 0.0)
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
@pytest.mark.parametrize("ranks, least, layouts", [(4, 2, 2), (4, 1, 1), (8, 4, 2)])
def test_no_plan_is_faster_where_ranks_differ(ranks, least, layouts, seed):
    check_best(unlike(seed, ranks, least, layouts))


@pytest.mark.parametrize("seed", range(share(10)))
def test_no_plan_is_faster_on_two_parts(seed):
    tree = split_meshes(6, 2, 2)
    assert [str(mesh) for mesh in tree.meshes()] == "@0-5 @0-1 @2-5 @2-3 @4-5".split()
    problem = iteration(seed, 6, 2, 1, 9.0)
    generator, meshes = random.Random(seed), tree.meshes()
    phases = tuple(
        tuple(call(one.name, generator, meshes, 1, one.resident, one.source) for one in phase)
        for phase in problem.phases
    )
    problem = MeshProblem((9.0,) * 6, 2, phases)
    assert best_plan(problem, tree).seconds == least_of_all(problem, tree)


def test_meshes_are_of_a_kind_where_all_is_alike_in_their_parts():
    problem, tree = iteration(1, 8, 2, 1, 8.0), aligned_meshes(8, 2)
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
    problem = iteration(seed, 8, 1, 2, 9.0)
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
    times = place_calls(problem.graph(plan))
    assert times["train"] == (7, 12) and {times["left"], times["right"]} == {times["left"]}
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
