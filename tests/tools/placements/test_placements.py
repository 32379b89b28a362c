"""Placements by name: each is the best of all that obey its definition, found here by trying them all."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements.across_iterations import ACTOR_LANE, CRITIC_LANE, best_lanes, period_seconds
from placements.mesh import Mesh, hardware_on
from placements.placements import OVERLAPPED, SHAPES, placements
from placements.placements_text import as_dict, as_text
from placements.problem import Call, Choice, MeshProblem, Option
from placements.run_problem import SOURCES, RunProblem, least_mesh, run_meshes
from testkit.call_graph import GraphCall, place_calls
from testkit.mesh_cases import PHASES, plans, random_problem
from testkit.profiles import examples, share

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.machines import Machines
from rlhfuse.costs.hardware import hardware_by_name

H100 = replace(hardware_by_name("h100"), devices_per_node=4)
A100 = replace(hardware_by_name("a100"), devices_per_node=4)


def random_run(seed, kinds=((H100, 4),), degrees=(1, 2), phases=PHASES, meshes=None, least=None):
    """The same options for meshes of one size and kind."""
    generator, machines = random.Random(seed), Machines.of(kinds)
    meshes, least = meshes or run_meshes(machines), least or least_mesh(machines)
    memory = sum(((float(generator.randint(5, 12)),) * count for _, count in machines.kinds), ())

    groups = {}
    for mesh in meshes:
        groups.setdefault(hardware_on(machines, mesh), []).append(mesh)
    return RunProblem(random_problem(seed, list(groups.values()), memory, least, degrees, phases), machines, meshes)


def divide(run_problem, *meshes):
    """Whether two meshes are all ranks, and have none in common."""
    one, other = meshes
    return not one.overlaps(other) and one.size + other.size == run_problem.machines.ranks


def rest_is_everywhere(run_problem, plan, *names):
    return all(choice.mesh == run_problem.whole for name, choice in plan.items() if name not in names)


HALVES = {  # of which two calls share the ranks, and nothing else moves
    "split training": ("actor_train", "critic_train"),
    "interleaving 1": ("reference_inference", "reward_inference"),
}


def obeys(name, run_problem, plan):
    """The definitions."""
    at, whole = {call: choice.mesh for call, choice in plan.items()}, run_problem.whole
    actor, critic = at["actor_train"], at["critic_train"]
    reference, reward = at["reference_inference"], at["reward_inference"]
    if name == "colocated, serial":
        return rest_is_everywhere(run_problem, plan)
    if name in HALVES:
        one, other = HALVES[name]
        return divide(run_problem, at[one], at[other]) and rest_is_everywhere(run_problem, plan, one, other)
    if name == "interleaving 2":
        trainings = divide(run_problem, actor, critic) and at["critic_inference"] == critic
        scorers = divide(run_problem, reference, reward) and {reference, reward} == {actor, critic}
        return trainings and scorers and at["generation"] in (actor, whole)
    if name == "disaggregated":
        trains = [at["actor_train"], at["critic_train"]]
        others = [mesh for call, mesh in at.items() if not call.endswith("_train")]
        return not any(one.overlaps(other) for one in trains for other in others)
    if name == "critic across iterations":
        lanes = divide(run_problem, actor, critic)
        own = {actor: ("generation", "reference_inference"), critic: ("reward_inference", "critic_inference")}
        return lanes and all(at[call] == mesh for mesh, calls in own.items() for call in calls)
    assert name in ("REAL's heuristic", "free")
    return name == "free" or rest_is_everywhere(run_problem, plan)


def repeated(problem, plan, iterations):
    """A graph in which a training waits for all scores, a call that needs weights for their training before."""
    graph, scorers = [], [name for name in plan if name.endswith("_inference")]
    for number in range(iterations):
        for name in (name for name in (*ACTOR_LANE, *CRITIC_LANE) if name in plan):
            call, mesh = problem.calls[name], plan[name].mesh
            parents = [f"{scorer}.{number}" for scorer in scorers] if name.endswith("_train") else []
            parents += [f"generation.{number}"] if name in scorers else []
            parents += [f"{call.source}.{number - 1}"] if call.source and number else []
            ranks, seconds = (mesh.first, mesh.last), problem.call_seconds(call, plan)
            graph.append(GraphCall(f"{name}.{number}", ranks, seconds, tuple(parents)))
    return graph


def steady_state(problem, plan):
    """From the end of the third actor's training to that of the fourth."""
    ends = place_calls(repeated(problem, plan, 4))
    return ends["actor_train.3"][1] - ends["actor_train.2"][1]


@pytest.mark.parametrize("seed", range(share(12)))
def test_each_is_the_best_of_all_that_obey_its_definition(seed):
    """On four ranks with parts of two, and on two machines of a rank's size each."""
    if seed % 2:  # meshes of one rank are for the walk alone: too many plans to try
        kinds = tuple((replace(kind, devices_per_node=2), 2) for kind in (A100, H100))
        run_problem = random_run(seed, kinds, (1,), meshes=(Mesh(0, 2), Mesh(0, 4), Mesh(2, 2)), least=2)
    else:
        run_problem = random_run(seed)
    problem = run_problem.problem
    best = {}
    for plan in plans(problem, run_problem.aligned.meshes()):
        for name in (*SHAPES, "free"):
            if name != "REAL's heuristic" and obeys(name, run_problem, plan):
                seconds = steady_state(problem, plan) if name in OVERLAPPED else problem.seconds(plan)
                best[name] = min(best.get(name, float("inf")), seconds)
    found = {one.name: one for one in placements(run_problem)}
    assert list(found) == [*SHAPES, "free"]
    for name, one in found.items():
        if one.plan:
            assert problem.fits(one.plan) and obeys(name, run_problem, one.plan)
            assert one.seconds >= found["free"].seconds or name in OVERLAPPED
        if name != "REAL's heuristic":
            assert one.seconds == pytest.approx(best.get(name, float("inf"))), name
        assert bool(one.why_not) == (not one.plan)


@pytest.mark.parametrize("seed", range(max(2, share(6))))
def test_on_more_ranks_each_obeys_its_definition_and_none_beats_the_free_one(seed):
    kinds = ((H100, 16),) if seed % 2 else ((A100, 4), (H100, 12))
    run_problem = random_run(seed, kinds)
    found = {one.name: one for one in placements(run_problem)}
    assert run_problem.problem.fits(found["free"].plan)
    for name, one in found.items():
        if one.plan:
            assert obeys(name, run_problem, one.plan) and run_problem.problem.fits(one.plan), name
            assert one.seconds >= found["free"].seconds or name in OVERLAPPED
    assert found["free"] == placements(run_problem)[-1]  # nothing is random


def with_memory(run_problem, memory, **changes):
    problem = replace(run_problem.problem, memory_bytes=(memory,) * 4, **changes)
    return replace(run_problem, problem=problem)


def test_the_heuristic_has_as_many_tensor_ranks_as_fit():
    run_problem = random_run(3)

    def degrees(some):
        chosen = next(one for one in placements(some) if one.name == "REAL's heuristic")
        return {choice.option.layout.tp for choice in chosen.plan.values()}

    def heavier(some):
        return tuple(replace(one, passing_bytes=1e9) if one.layout.tp == 2 else one for one in some)

    assert degrees(with_memory(run_problem, 99.0)) == {2}
    phases = tuple(
        tuple(replace(one, options={m: heavier(some) for m, some in one.options.items()}) for one in phase)
        for phase in run_problem.problem.phases
    )
    assert degrees(with_memory(run_problem, 99.0, phases=phases)) == {1}


seconds = st.integers(0, 40).map(float)


@given(st.tuples(*[seconds] * 6), st.booleans(), st.booleans())
@examples(300)
def test_a_period_is_what_repeated_iterations_come_to(took, with_reference, with_reward):
    left, right = Mesh(0, 2), Mesh(2, 2)
    names = ("generation", "reference_inference", "actor_train", "reward_inference", "critic_inference", "critic_train")
    has = {"reference_inference": with_reference, "reward_inference": with_reward}
    gone = {name for name, there in has.items() if not there}
    calls, plan = {}, {}
    for number, (name, lasts) in enumerate(zip(names, took)):
        mesh = left if number < 3 else right
        option = Option(ParallelLayout(2, 1, 1), lasts, 1.0 if name.endswith("_train") else 0.0)
        calls[name] = Call(name, {mesh: (option,)}, SOURCES.get(name, ""))
        if name not in gone:
            plan[name] = Choice(mesh, option)
    phases = tuple(tuple(calls[name] for name in phase if name not in gone) for phase in PHASES)
    problem = MeshProblem((9.0,) * 4, 2, phases)
    assert steady_state(problem, plan) == pytest.approx(period_seconds(problem, plan))
    found = best_lanes(problem, left, right)
    assert found and found[0] == period_seconds(problem, plan) and found[1] == plan
    assert best_lanes(replace(problem, memory_bytes=(0.5,) * 4), left, right) is None


def test_what_a_run_does_not_have_is_said():
    without = random_run(1, phases=(("generation",), ("reference_inference",), ("actor_train",)))
    found = {one.name: one for one in placements(without)}
    assert found["split training"].why_not == "this run has no critic_train"
    assert found["interleaving 1"].why_not == "this run has no reward_inference"
    assert found["disaggregated"].plan and found["free"].plan
    one = random_run(2, kinds=((H100, 1),))
    found = {one.name: one for one in placements(one)}
    assert found["split training"].why_not.startswith("1 ranks have no two parts")
    full = with_memory(without, 0.5)
    assert all("fits into" in one.why_not or "this run has no" in one.why_not for one in placements(full))


def test_the_table_names_all_and_compares_with_what_runs_today():
    run_problem = random_run(4)
    found = placements(run_problem)
    text, raw = as_text(found, 50.0), as_dict(found, 50.0)
    assert max(map(len, text.splitlines())) < 200
    for one in found:
        assert any(line.startswith(f"  {one.name} ") for line in text.splitlines())
    assert "colocated, fused" in text and "50   1.00" in text
    assert raw["today_seconds"] == 50 and [row["name"] for row in raw["placements"]] == [one.name for one in found]
    row = raw["placements"][0]
    assert row["over_today"] == 50 / found[0].seconds
    call = row["calls"]["generation"]
    assert call["ranks"] == [0, 3] and ParallelLayout.parse(call["layout"]).size == 4
    assert f"@0-3 generation {call['layout']}" in text
    full = placements(with_memory(run_problem, 0.5), run_problem)
    refused, text = as_dict(full, None)["placements"][0], as_text(full, None, "no room")
    assert set(refused) == {"name", "bound", "why_not"} and refused["why_not"].split(" on ")[0] in text
    assert "colocated, fused                -      -       -  no room" in text and f" {refused['bound']:.4g} " in text


@pytest.mark.parametrize("seed", range(max(2, share(12))))
def test_a_bound_is_what_a_placement_takes_with_all_memory(seed):
    """With less it is no faster, and may not be at all."""
    roomy = with_memory(random_run(seed), 1e9)
    for memory in (2.0, 6.0, 1e9):
        for one, free in zip(placements(with_memory(roomy, memory), roomy), placements(roomy)):
            assert one.bound == pytest.approx(free.seconds) or one.name == "free"
            assert one.seconds >= one.bound or one.name == "free"
            assert one.bound < float("inf") or free.why_not
