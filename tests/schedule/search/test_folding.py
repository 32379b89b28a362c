"""Folding a problem and unfolding its schedules: what is merged, and that what comes out is valid."""

import itertools
import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import (
    TABLE_3,
    capped_greedy,
    capped_halfway,
    changed_facts,
    random_problem,
    table_3,
    table_3_problem,
)
from testkit.solutions import check_found, check_solution, solution_in

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.folding import EARLY, SKEWS, Unfolder, folded_problem
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.schedule.search.solution import Incumbent, Objective, schedule_of
from rlhfuse.schedule.search.worker import SearchWorker


def drawn(seed, largest=4):
    """A random problem that leaves no node idle."""
    problems = (random_problem(seed + k, largest) for k in itertools.count())
    return next(p for p in problems if len({node for q in p.pipelines for node in q.placement}) == p.nodes)


def doubled(problem, seed):
    """A problem that folds to the nodes and pipelines of `problem`: every stage in two parts of unlike times."""
    rng = random.Random(seed)
    flipped = [rng.randint(0, 1) for _ in range(problem.nodes)]

    def parts(values):
        return tuple(value * share for value in values for share in rng.choice(((0.5, 0.5), (0.25, 0.75), (1, 1))))

    def pipeline(p):
        placement = tuple(2 * node + (half ^ flipped[node]) for node in p.placement for half in (0, 1))
        count = 2 * p.microbatches - rng.randint(0, 1)
        return replace(p, placement=placement, microbatches=count, **changed_facts(p, parts))

    return replace(problem, nodes=2 * problem.nodes, pipelines=tuple(map(pipeline, problem.pipelines)))


def unfolder_of(small, large):
    graph = build_graph(large)
    return Unfolder(build_graph(small), Dispatcher(graph)), graph


def test_two_stages_two_nodes_and_two_micro_batches_become_one():
    actor = Pipeline(
        "a", "actor", (0, 1, 2, 3), 5, (1, 2, 3, 4), (2, 2, 5, 6), (1, 2, 3, 1), (1, 1, 1, 2), (1, 0, 2, 2)
    )
    critic = Pipeline("c", "critic", (3, 2, 1, 0), 4, (1,) * 4, (2,) * 4, (1, 2, 3, 4))
    problem = FusionProblem(4, (actor, critic), transfer=0.5, memory_cap=(20, 30, 40, 35), static_memory=(0, 11, 1, 0))
    folded = folded_problem(problem)
    assert (folded.nodes, folded.transfer, folded.memory_cap, folded.static_memory) == (2, 1, (19, 35), 0)
    assert folded.pipelines == (
        Pipeline("a", "actor", (0, 1), 3, (3, 7), (4, 11), (4, 6), (2, 3), (2, 4)),
        Pipeline("c", "critic", (1, 0), 2, (2, 2), (4, 4), (4, 8)),
    )
    assert folded_problem(folded).nodes == 1


def test_what_has_no_pairs_is_not_folded():
    def of(*placements):
        rows = [(tuple(row), 4, *((1,) * len(row),) * 3) for row in placements]
        return folded_problem(FusionProblem(4, tuple(Pipeline(str(k), "m", *row) for k, row in enumerate(rows))))

    assert of((0, 1, 2, 3), (1, 0), (3, 2)) is not None
    assert of((0, 1, 2, 3, 0, 1, 2, 3)) is not None  # interleaved
    assert of((0, 1, 2)) is None  # an odd number of stages
    assert of((0, 1, 2, 3), (0, 2), (1, 3)) is None  # other pairs
    assert of((0, 1, 2, 3), (0, 0)) is None  # a pair of one node
    assert of((0, 1)) is None  # two nodes are in no pair


def test_a_cap_that_holds_no_two_micro_batches_is_not_folded():
    problem = table_3_problem(4, 4, 8, 8, 1, 1, 1, 1)
    assert folded_problem(replace(problem, memory_cap=2)) is not None
    assert folded_problem(replace(problem, memory_cap=1.5)) is None


def test_the_bound_hardly_changes():
    for number, (row, _, bound, *_) in enumerate(TABLE_3):
        assert row[2] < 32 or latency_bound(folded_problem(table_3(number))) == pytest.approx(bound, rel=0.06)


@examples(60)
@given(st.integers(0, 10**6), st.sampled_from((greedy, capped_greedy, serial_1f1b)), st.booleans())
def test_what_comes_out_is_valid_and_costs_what_it_says(seed, builder, capped):
    problem = doubled(drawn(seed), seed)
    problem = capped_halfway(problem) if capped else problem
    folded = folded_problem(problem)
    if folded is None:
        assert capped
        return
    asked = []
    unfolder, graph = unfolder_of(folded, problem)
    start = solution_in(builder(folded))
    lifted, fastest = unfolder.extend(start, lambda solution: asked.append(solution) or len(asked) % 2 == 0)
    assert len(asked) == len(SKEWS) * len(EARLY)
    for solution in asked:
        check_found(graph, solution)
    assert lifted[:2] == min(solution[:2] for solution in asked[1::2])
    assert fastest[:2] == min(solution[:2] for solution in asked)
    again, _ = unfolder_of(folded, problem)[0].extend(start, lambda solution: True)
    once_more, _ = unfolder.extend(start, lambda solution: True)
    assert (again is None) == (once_more is None)
    assert again is None or again.sequence.tolist() == once_more.sequence.tolist()


def test_a_pipeline_alone_unfolds_into_1f1b():
    """Two pipelined stages for one lose nothing where no other model stands between them."""
    times = (2,) * 8, (4,) * 8, (1,) * 8
    problem = FusionProblem(8, (Pipeline("actor", "actor", tuple(range(8)), 32, *times),))
    folded = folded_problem(problem)
    unfolder, graph = unfolder_of(folded, problem)
    lifted, _ = unfolder.extend(solution_in(serial_1f1b(folded)), lambda solution: True)
    check_solution(graph, lifted)
    assert lifted.makespan == latency_bound(problem) == 6 * (32 + 7) and lifted.peak_memory <= 10


@examples(15)
@given(st.integers(0, 10**6), st.sampled_from(("latency", "memory", "slack")))
def test_a_worker_on_folded_levels(seed, kind):
    """Small problems are folded too here: rounds find what is valid, and the same for the same seed."""
    problem = doubled(doubled(drawn(seed, largest=3), seed), seed + 1)
    latency = latency_bound(problem) * 1.1 if kind == "slack" else None

    def keys():
        start = Incumbent.of(greedy(problem))
        objective = Objective(problem, "latency" if kind == "latency" else "memory", latency)
        worker = SearchWorker(build_graph(problem), objective, [start], seed, 0)
        found = []
        for _ in range(8):
            done = worker.round(start, 1000, 0.1)
            if done.solution is not None:
                check_solution(worker.levels[-1].graph, done.solution)
                start = Incumbent.of(schedule_of(worker.levels[-1].graph, done.solution.sequence))
                found.append(tuple(done.solution.sequence))
        for level in worker.levels:
            check_solution(level.graph, level.best)
        return len(worker.levels), found

    with patch("rlhfuse.schedule.search.worker.FOLDED_OPERATIONS", 0):
        levels, found = keys()
        assert levels >= 3 and keys() == (levels, found)


@pytest.mark.ci
def test_a_large_problem_comes_near_its_bound():
    """Within 1% after 120 moves per operation; without folded levels it is 4% there."""
    large, moves = table_3_problem(32, 32, 64, 64, 2, 1, 1.64, 1), SearchSettings(iterations=120 * 8192)
    _, report = search(large, moves)
    assert report.lower_bound == 636 and report.makespan <= 642
    with patch("rlhfuse.schedule.search.worker.FOLDED_OPERATIONS", 10**6):
        _, flat = search(large, moves)
    assert flat.makespan > 650


@examples(60)
@given(st.integers(0, 10**6))
def test_the_starts_of_a_schedule_as_aims_give_it_back(seed):
    problem = random_problem(seed)
    schedule, graph = capped_greedy(problem), build_graph(problem)
    timeline = evaluate(schedule)
    aim = np.empty(graph.size)
    for order, starts in zip(schedule.orders, timeline.starts):
        aim[[graph.number[action] for action in order]] = starts
    again = Dispatcher(graph).follow(aim, 1e-6)
    assert schedule_of(graph, again.sequence).orders == schedule.orders
