"""Placements by name: each is the best of all that obey its definition, found here by trying them all."""

import heapq
import random
from dataclasses import replace

import pytest
from placements.across_iterations import ACTOR_LANE, CRITIC_LANE
from placements.mesh import Mesh, hardware_on
from placements.placements import OVERLAPPED, SHAPES, placements
from placements.run_problem import RunProblem, least_mesh, run_meshes
from testkit.mesh_cases import PHASES, plans, random_problem
from testkit.profiles import share

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


def steady_state(problem, plan, iterations=4):
    """From the end of the last but one training of the actor to that of the last.

    A training waits for all scores, a call that needs weights for their training before. Calls that are ready first go
    first (REAL, appendix C, Algorithm 1).
    """
    calls, scorers = {}, [name for name in plan if name.endswith("_inference")]
    for number in range(iterations):
        for name in (name for name in (*ACTOR_LANE, *CRITIC_LANE) if name in plan):
            call = problem.calls[name]
            parents = [(scorer, number) for scorer in scorers] if name.endswith("_train") else []
            parents += [("generation", number)] if name in scorers else []
            parents += [(call.source, number - 1)] if call.source and number else []
            calls[name, number] = plan[name].mesh, problem.call_seconds(call, plan), parents
    order = {one: place for place, one in enumerate(calls)}
    queue, ends = [(0.0, order[one], one) for one, (_, _, parents) in calls.items() if not parents], {}
    while queue:
        ready, _, one = heapq.heappop(queue)
        mesh, seconds, _ = calls[one]
        ends[one] = max([ready, *(end for other, end in ends.items() if calls[other][0].overlaps(mesh))]) + seconds
        for child, (_, _, parents) in calls.items():
            if one in parents and all(parent in ends for parent in parents):
                heapq.heappush(queue, (max(ends[parent] for parent in parents), order[child], child))
    return ends["actor_train", iterations - 1] - ends["actor_train", iterations - 2]


@pytest.mark.parametrize("seed", range(share(12)))
def test_each_is_the_best_of_all_that_obey_its_definition(seed):
    """On four ranks with parts of two, and on two machines of a rank's size each."""
    if seed % 2:  # meshes of one rank make too many plans to try
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
