"""The bound of memory and time against exact optima (CP-SAT), against schedules, and against what rules prove."""

import random
from dataclasses import replace

import pytest
from testkit.profiles import share
from testkit.schedule_cases import capped_greedy, capped_halfway, random_problem, table_3

from rlhfuse.schedule.bounds import configurations
from rlhfuse.schedule.bounds.bounds import latency_bound, quick_bound
from rlhfuse.schedule.bounds.configurations import configurations_bound
from rlhfuse.schedule.bounds.windows import Windows
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import min_memory, one_at_a_time, serial_1f1b

EDGE = 1e-9
PROBLEMS, WORK = 40, 0.1  # to solve, and how hard CP-SAT tries each (exact.py)


def tight_problem(seed):
    """Two models in opposite directions over two to four nodes, whole or split, with little room on every node."""
    rng = random.Random(seed)
    nodes, split = rng.randint(2, 4), seed % 2

    def pipeline(name, placement, count):
        forward, backward, held = ([rng.randint(1, 4) for _ in placement] for _ in range(3))
        weights = [rng.randint(1, 3) for _ in placement] if split else None
        later = [rng.randint(0, 5) for _ in placement] if split and rng.random() < 0.7 else None
        times = map(tuple, (forward, backward, held))
        return Pipeline(name, name, placement, count, *times, *(v and tuple(v) for v in (weights, later)))

    ahead = tuple(range(nodes))
    pipelines = pipeline("actor", ahead, rng.randint(2, 4)), pipeline("critic", ahead[::-1], rng.randint(1, 3))
    problem = FusionProblem(nodes, pipelines, transfer=rng.choice((0, 0, 1)))
    return replace(problem, memory_cap=tuple(least + rng.choice((0, 0, 1, 2)) for least in min_memory(problem)))


def closed_problem():
    """Two models one way on nodes with room for one micro-batch of either: nothing overlaps."""
    actor, critic = (
        Pipeline(name, name, (0, 1), 6, (forward, forward), (2 * forward, 2 * forward), (2, 2))
        for name, forward in (("actor", 5), ("critic", 2))
    )
    return FusionProblem(2, (actor, critic), memory_cap=3)


def test_it_never_passes_the_optimum_and_often_says_more_than_the_rules():
    pytest.importorskip("ortools", reason="ortools is not installed: pip install 'rlhfuse[exact]'")
    from testkit import exact_schedules as exact

    proved = more = 0
    for seed in range(share(PROBLEMS)):
        problem = tight_problem(seed)
        optimum = exact.least_makespan(problem, work=WORK)
        if optimum.proved:
            bound, rules = configurations_bound(problem), quick_bound(problem)
            assert bound <= optimum.value * (1 + EDGE) and rules <= latency_bound(problem) <= optimum.value, seed
            proved, more = proved + 1, more + (bound > rules)
    assert proved > share(PROBLEMS) * 2 / 3 and more > proved / 6, (proved, more)


def test_it_never_passes_what_a_builder_made_under_a_cap_of_its_own():
    for seed in range(share(300)):
        problem = random_problem(seed, largest=10 if seed % 4 == 0 else 4)
        for build in (serial_1f1b, one_at_a_time, capped_greedy):
            timeline = evaluate(build(problem))
            for cap in (timeline.peak_memory, timeline.node_peak_memory):
                bound = configurations_bound(replace(problem, memory_cap=cap))
                assert bound <= timeline.makespan * (1 + EDGE), seed


def test_it_proves_that_nothing_overlaps_where_two_do_not_fit():
    problem = closed_problem()
    makespan = evaluate(one_at_a_time(problem)).makespan
    assert latency_bound(problem) == makespan
    rules = Windows.of(problem).within([3] * problem.nodes)
    assert rules and not rules.excludes(0.8 * makespan, disjunctions=True)


def test_whole_numbers_prove_more_than_memory_times_time(monkeypatch):
    problem = closed_problem()
    whole = configurations_bound(problem)
    monkeypatch.setattr(configurations, "MOST_CONFIGURATIONS", 0)
    assert 0 < configurations_bound(problem) < whole


def test_prices_that_are_cut_short_prove_less_and_nothing_false(monkeypatch):
    problems = [capped_halfway(table_3(row)) for row in range(0, 12, 3)] + [tight_problem(seed) for seed in range(8)]
    whole = [configurations_bound(problem) for problem in problems]
    monkeypatch.setattr(configurations, "MOST_EXCHANGES", 1)
    short = [configurations_bound(problem) for problem in problems]
    assert all(a <= b * (1 + EDGE) for a, b in zip(short, whole)) and sum(short) < sum(whole)


def test_room_for_everything_says_nothing():
    problem = table_3(2)
    assert configurations_bound(problem) == configurations_bound(replace(problem, memory_cap=1e6)) == 0
    assert latency_bound(replace(problem, memory_cap=1e6)) == latency_bound(problem)
