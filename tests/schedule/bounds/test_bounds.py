"""Bounds against exact optima (CP-SAT), against every builder's schedules, and each rule against a plain twin."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples, share
from testkit.schedule_cases import TABLE_3, capped_greedy, random_problem, table_3, table_3_problem, with_facts

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound, memory_bound
from rlhfuse.schedule.bounds.window_rules import edge_finding, least_makespan
from rlhfuse.schedule.io import schedule_dict
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, min_memory, serial_1f1b, serial_makespan, serial_peak_memory
from rlhfuse.schedule.search.search import SearchSettings, search

EDGE = 1e-9
PROBLEMS, WORK = 60, 0.1  # small problems to solve, and how hard CP-SAT tries each (exact.py)


def operations(problem):
    return sum(p.stages * p.microbatches * (3 if p.split else 2) for p in problem.pipelines)


def small_problem(seed):
    """At most 40 operations: actor and critic in opposite directions, or any pipelines that may visit a node twice.

    All numbers are multiples of 1/4.
    """
    rng = random.Random(seed)
    problem = None
    while problem is None or operations(problem) > 40:
        problem = opposite_problem(rng) if seed % 3 == 0 else quarters(random_problem(rng.random(), 3))
    return problem


def opposite_problem(rng):
    stages = rng.choice([2, 2, 3, 4])
    groups = rng.choice([g for g in (1, 2) if stages % g == 0])
    f0, f1 = rng.randint(1, 5), rng.randint(1, 5)
    count = rng.randint(2, 5)
    return table_3_problem(stages, stages // groups, count, rng.randint(1, count), f0, f1, 2, rng.choice([1, 1.5, 2]))


def quarters(problem):
    return with_facts(problem, lambda values: [max(1, round(4 * value)) / 4 for value in values])


def split_problem(seed):
    """At most 30 operations in split pipelines, some of which visit a node twice; from B to W less is held, or more."""
    rng, problem = random.Random(1000 + seed), None
    while problem is None or not 8 <= operations(problem) <= 30:
        problem = quarters(random_problem(rng.random(), 3))
        pipelines = []
        for p in problem.pipelines:
            weight = tuple(rng.randint(1, 3) for _ in p.placement)
            held = tuple(rng.randint(0, 16) / 4 for _ in p.placement) if rng.random() < 0.7 else None
            pipelines.append(replace(p, weight_gradient=weight, weight_activation=held))
        problem = replace(problem, pipelines=tuple(pipelines))
    return problem


def needed(problem):
    """The least cap under which a schedule exists: the fullest node of one micro-batch by itself."""
    return max(min_memory(problem))


@pytest.mark.parametrize("draw", [small_problem, split_problem])
def test_bounds_and_claims_against_exact_optima(draw):
    """Bounds never pass the optimum, `optimal` is never said where CP-SAT finds better, search mostly finds it."""
    pytest.importorskip("ortools", reason="ortools is not installed: pip install 'rlhfuse[exact]'")
    from testkit import exact_schedules as exact

    seen = Counter()

    def hold(asked, bound, optimum, seed):
        """Hold a bound against a proved optimum and count where it is met."""
        if optimum.proved:
            assert bound <= optimum.value * (1 + EDGE), f"{asked} of {draw.__name__}({seed}): {bound}, {optimum.value}"
            seen[asked] += 1
            seen[asked, "met"] += bound >= optimum.value * (1 - EDGE)

    for seed in range(share(PROBLEMS)):
        problem, rng = draw(seed), random.Random(seed)
        fastest = exact.least_makespan(problem, work=WORK)
        if not fastest.proved:
            continue
        hold("latency", latency_bound(problem), fastest, seed)
        within = math.floor(4 * fastest.value * rng.choice([1, 1, 1.1, 1.3])) / 4
        hold("memory", memory_bound(problem, within), exact.least_memory(problem, within, work=WORK), seed)
        capped = replace(problem, memory_cap=needed(problem) + rng.choice([0, 0.5, 1, 2]))
        hold("capped latency", latency_bound(capped), exact.least_makespan(capped, work=WORK), seed)
        below = replace(problem, memory_cap=needed(problem) - 0.25)
        assert exact.least_makespan(below, work=WORK).value is None, seed
        if draw is small_problem and seed % 2 == 0:
            schedule, report = search(problem, SearchSettings(iterations=20_000, seed=seed, objective="memory"))
            least = exact.least_memory(problem, report.makespan, work=WORK)
            told = schedule_dict(schedule)
            seen["searched"] += 1
            seen["found fastest"] += report.makespan <= fastest.value * (1 + EDGE)
            assert report.optimal == told["optimal"] <= (report.makespan <= fastest.value * (1 + EDGE)), seed
            assert not told["memory_optimal"] or report.peak_memory <= (least.value or math.inf) * (1 + EDGE), seed
            seen["least known"] += least.proved
            seen["found leanest"] += least.proved and report.peak_memory <= least.value * (1 + EDGE)
    for asked in ("latency", "memory", "capped latency"):
        assert seen[asked] >= share(PROBLEMS) / 2 and seen[asked, "met"] > seen[asked] / 2, seen
    assert seen["found fastest"] >= 0.9 * seen["searched"]
    assert seen["found leanest"] >= 0.8 * seen["least known"] >= 0.5 * seen["searched"], seen


def test_bounds_never_pass_what_a_builder_made():
    """A cap at each schedule's own peak included: then the latency bound must not pass its makespan."""
    for seed in range(share(400)):
        problem = random_problem(seed, largest=10 if seed % 4 == 0 else 4)
        fastest = latency_bound(problem)
        for build in (serial_1f1b, greedy, capped_greedy, lambda p: capped_greedy(p, 2)):
            timeline = evaluate(build(problem))
            capped = replace(problem, memory_cap=timeline.peak_memory)
            assert fastest <= latency_bound(capped) * (1 + EDGE) <= timeline.makespan * (1 + 2 * EDGE), seed
            assert memory_bound(problem, timeline.makespan) <= timeline.peak_memory * (1 + EDGE), seed


def test_a_split_backward_may_release_the_earlier_stage_first():
    """Two micro-batches at the second visit to node 1 need not be held at the first: 91 is possible under this cap."""
    pipeline = Pipeline("a", "a", (1, 1, 0), 4, (1, 5, 2), (5, 5, 2), (3.5, 1, 1.5), (2, 3, 2))
    problem = FusionProblem(2, (pipeline, Pipeline("b", "b", (0,), 2, (2.25,), (2,), (2,))), memory_cap=5.5)
    assert latency_bound(problem) <= 91


@pytest.mark.parametrize("row", range(len(TABLE_3)))
def test_table_3_serial_and_bounds(row):
    problem, (_, serial, bound, serial_memory, proved) = table_3(row), TABLE_3[row]
    assert serial_makespan(problem) == serial and serial_peak_memory(problem) == serial_memory
    assert latency_bound(problem) == bound and memory_bound(problem, bound) == proved <= serial_memory


def test_a_schedule_file_says_its_gaps():
    problem = table_3(2)
    told = schedule_dict(greedy(problem))
    assert told["latency_gap"] == pytest.approx(told["makespan"] / TABLE_3[2][2] - 1) and told["latency_gap"] > 0
    assert told["memory_gap"] == pytest.approx(told["peak_memory"] / told["memory_lower_bound"] - 1)
    assert told["memory_gap"] > 0 and not told["optimal"] and not told["memory_optimal"]
    alone = replace(problem, pipelines=problem.pipelines[:1])
    told = schedule_dict(serial_1f1b(alone))
    assert told["optimal"] and told["memory_optimal"] and told["latency_gap"] == told["memory_gap"] == 0
    told = schedule_dict(serial_1f1b(replace(alone, memory_cap=15.59)))  # breaks its cap, so it proves nothing
    assert told["makespan"] <= told["lower_bound"] and not told["optimal"]


@examples(60)
@given(st.integers(0, 10**6))
def test_bounds_move_with_what_they_are_asked(seed):
    """A tighter cap never lowers the latency bound, a later makespan never raises the memory bound."""
    problem = random_problem(seed)
    free = latency_bound(problem)
    memories = [memory_bound(problem, free * slower) for slower in (1, 1.05, 1.2, 1.5, 3)]
    assert memories == sorted(memories, reverse=True)
    least = needed(problem)
    assert memories[-1] > 0 and memory_bound(problem, 1e9) <= least * (1 + EDGE)
    latencies = [latency_bound(replace(problem, memory_cap=least * more)) for more in (1, 1.5, 2, 4, 100)]
    assert all(late >= soon * (1 - EDGE) for late, soon in zip(latencies, latencies[1:]))
    assert latencies[-1] == pytest.approx(free, rel=EDGE)
    for more, latency in zip((1, 1.5, 2, 4, 100), latencies):
        rough = latency_bound(replace(problem, memory_cap=least * more), precision=0.02)
        assert latency * 0.98 * (1 - EDGE) <= rough <= latency * (1 + EDGE)


def test_a_node_visited_twice_holds_both():
    """Down and up over one node twice: every micro-batch at the second visit is still held at the first."""
    problem = FusionProblem(1, (Pipeline("a", "a", (0, 0), 2, (1, 1), (1, 1), (2, 3)),))
    assert memory_bound(problem, 100) == 5
    assert latency_bound(replace(problem, memory_cap=5)) == 8
    with pytest.raises(InputError, match="node 0: the memory cap leaves 4 .* one micro-batch needs 5"):
        latency_bound(replace(problem, memory_cap=4))


def test_times_without_a_common_tick_are_bounded_to_the_last_digit():
    """The bound under a cap is found by bisection; scaling all times must scale it."""
    problem = replace(table_3_problem(4, 2, 8, 4, 5, 4, 2, 2), memory_cap=5)
    whole = latency_bound(problem)
    shrunk = with_facts(problem, lambda times: [0.7 * time for time in times], ["forward", "backward"])
    assert whole * 0.7 * (1 - EDGE) - 0.7 <= latency_bound(shrunk) <= whole * 0.7 * (1 + EDGE)


def test_large_problems_are_bounded():
    problem = table_3_problem(64, 32, 256, 128, 2, 2, 1.64, 2)
    bound = latency_bound(problem)
    memory = memory_bound(problem, bound)
    assert bound <= evaluate(greedy(problem)).makespan and memory > 64


def one_machine(rng, count):
    """Operations (head, duration, tail) of one node and a makespan near what they need."""
    jobs = [(rng.randint(0, 8), rng.randint(1, 5), rng.randint(0, 8)) for _ in range(count)]
    return jobs, max(h + d + t for h, d, t in jobs) + rng.randint(0, 12)


def orders_that_fit(jobs, makespan):
    """Start times of every order whose operations all end in time."""
    for order in itertools.permutations(range(len(jobs))):
        clock, starts = 0, [0] * len(jobs)
        for job in order:
            head, duration, tail = jobs[job]
            starts[job] = max(clock, head)
            clock = starts[job] + duration
            if clock + tail > makespan:
                break
        else:
            yield starts


def test_narrow_keeps_every_order_that_fits():
    rng = random.Random(7)
    rose = refused = 0
    for _ in range(share(800)):
        jobs, makespan = one_machine(rng, rng.randint(2, 6))
        heads, duration, tails = (np.array(column, float) for column in zip(*jobs))
        outcome = edge_finding(np.arange(len(jobs)), heads, tails, duration, float(makespan), 1e-9)
        fitting = list(orders_that_fit(jobs, makespan))
        if outcome < 0:
            assert not fitting
            refused += 1
        elif fitting:
            assert (heads <= np.min(fitting, axis=0)).all()
            rose += outcome
    assert min(rose, refused) > share(50)


def test_overload_is_the_largest_of_all_sets():
    rng = random.Random(3)
    for _ in range(share(200)):
        jobs, _ = one_machine(rng, rng.randint(1, 6))
        sets = (s for size in range(1, len(jobs) + 1) for s in itertools.combinations(jobs, size))
        plain = max(min(h for h, _, _ in s) + sum(d for _, d, _ in s) + min(t for _, _, t in s) for s in sets)
        heads, duration, tails = (np.array(column, float) for column in zip(*jobs))
        by_head, by_tail = np.argsort(heads), np.argsort(tails)
        assert least_makespan(heads, tails, duration, by_head, by_tail, np.array([0, len(jobs)])) == plain
