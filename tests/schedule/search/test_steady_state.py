"""Extending steady states: units, levels, and that what comes out is valid, costs what it says and keeps a period."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import TABLE_3, capped_greedy, capped_halfway, random_problem, table_3
from testkit.solutions import check_found, check_solution, solution_in

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time, serial_1f1b
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.solution import schedule_of
from rlhfuse.schedule.search.steady_state import (
    FEWEST_UNITS,
    SteadyStateExtender,
    coarser_problem,
    period_of,
    units_of,
    with_units,
)

BUILDERS = (greedy, capped_greedy, serial_1f1b)


def extended(schedule, large, better=lambda solution: True, stretched=False):
    """(best that fits and is better, fastest, all 96 that were tried, graph of the large problem)."""
    graph = build_graph(large)
    extender = SteadyStateExtender(build_graph(schedule.problem), Dispatcher(graph), stretched)
    made = []

    def asked(solution):
        made.append(solution)
        return better(solution)

    with patch("rlhfuse.schedule.search.steady_state.TRIED_OPERATIONS", 96 * graph.size):
        return *extender.extend(solution_in(schedule), asked), made, graph


def peaks_of(graph, solution):
    return evaluate(schedule_of(graph, solution.sequence)).node_peak_memory


def one_pipeline(microbatches, stages=4):
    nodes = tuple(range(stages))
    times = (1,) * stages, (2,) * stages, (1.5,) * stages
    return FusionProblem(stages, (Pipeline("actor", "actor", nodes, microbatches, *times),))


@examples(100)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_units_keep_the_proportions_and_the_rest(seed, units):
    problem = random_problem(seed)
    scaled = with_units(problem, units)
    counts = [p.microbatches for p in problem.pipelines]
    assert units_of(problem) == math.gcd(*counts) and units_of(scaled) == units
    assert with_units(scaled, units_of(problem)) == problem
    assert period_of(scaled) == pytest.approx(period_of(problem))
    # the period, from the operations: the busiest node's work, shared among the units
    graph = build_graph(scaled)
    assert period_of(problem) * units == pytest.approx(np.bincount(graph.node, graph.duration).max())


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_coarser_is_half_where_every_unit_costs_a_period_and_else_nothing(seed, units):
    problem = with_units(random_problem(seed), units)
    half = (units + 1) // 2
    small = coarser_problem(problem)
    added = latency_bound(problem) - latency_bound(with_units(problem, half))
    exact = added == pytest.approx((units - half) * period_of(problem), rel=3e-9)
    assert small == (with_units(problem, half) if half >= FEWEST_UNITS and exact else None)


def test_coarser_happens_and_does_not():
    """So that the test above is of both kinds; (8, 4, 8, 4) would halve to where the bound is another."""
    problems = list(map(table_3, range(len(TABLE_3))))
    chosen = list(map(coarser_problem, problems))
    assert [units_of(small) if small else 0 for small in chosen] == [8, 0, 0, 16, 0, 0, 16, 8, 0, 32, 0, 0]
    for problem, (_, _, bound, *_), small in zip(problems, TABLE_3, chosen):
        if small is not None:
            left_out = units_of(problem) - units_of(small)
            assert latency_bound(small) + left_out * period_of(problem) == bound
    # half of (8, 8, 8, 8): 4 units, not too few, but 141 + 4 * 21 < 225
    assert latency_bound(with_units(problems[5], 4)) + 4 * 21 != latency_bound(problems[5])
    assert coarser_problem(one_pipeline(7)) == one_pipeline(4) and coarser_problem(one_pipeline(6)) is None


@examples(30)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.sampled_from(BUILDERS))
def test_what_comes_out_is_valid_and_costs_what_it_says(seed, units, added, builder):
    """Exact levels or not, periodic or not, any placement, lags and split backwards: all tries are schedules."""
    problem = random_problem(seed)
    small, large = with_units(problem, units), with_units(problem, units + added)
    lifted, fastest, tries, graph = extended(builder(small), large)
    assert len(tries) == 96 and any(lifted is solution for solution in tries)
    assert fastest.makespan == min(solution.makespan for solution in tries)
    for solution in [lifted, fastest, *tries[:: len(tries) // 6]]:
        check_solution(graph, solution)


@pytest.mark.parametrize("small, large", [(8, 16), (8, 9), (5, 64), (12, 23)])
def test_1f1b_extends_to_its_bound_in_the_same_memory(small, large):
    start = serial_1f1b(one_pipeline(small))
    before = evaluate(start)
    assert before.makespan == latency_bound(start.problem) == 9 + 3 * small
    lifted, fastest, _, graph = extended(start, one_pipeline(large))
    assert lifted.makespan == fastest.makespan == latency_bound(graph.problem) == 9 + 3 * large
    assert lifted.peak_memory == before.peak_memory == 6
    assert peaks_of(graph, lifted) == before.node_peak_memory
    if (small, large) == (8, 16):  # the middle is repeated as it is
        assert schedule_of(graph, lifted.sequence).orders == serial_1f1b(one_pipeline(16)).orders


@examples(30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_under_caps_every_try_fits_and_the_best_of_the_better_is_taken(seed, choice):
    """Caps halfway between the peaks of two tries, node by node, beside static memory."""
    problem = random_problem(seed)
    start, large = greedy(with_units(problem, 2)), with_units(problem, 5)
    _, _, tries, graph = extended(start, large)
    a, b = peaks_of(graph, tries[choice % len(tries)]), peaks_of(graph, tries[choice // 7 % len(tries)])
    static = 1 + choice % 3
    capped = replace(large, memory_cap=tuple((x + y) / 2 + static for x, y in zip(a, b)), static_memory=static)
    lifted, fastest, again, graph = extended(start, capped)
    for solution in again:
        check_found(graph, solution)
    assert lifted[:2] == fastest[:2] == min(solution[:2] for solution in again)
    slower = min((s[:2] for s in again if s[:2] > lifted[:2]), default=None)
    lifted, fastest, _, _ = extended(start, capped, better=lambda solution: solution[:2] > fastest[:2])
    assert (lifted[:2] if lifted else None) == slower


@examples(30)
@given(st.integers(0, 10**6))
def test_a_steady_state_repeated_under_a_tight_cap_fits(seed):
    """Whatever the period."""
    small, large = with_units(random_problem(seed), 5), with_units(random_problem(seed), 11)
    small, large = (replace(problem, memory_cap=capped_halfway(large).memory_cap) for problem in (small, large))
    _, fastest, tries, graph = extended(one_at_a_time(small), large, stretched=True)
    for solution in [fastest, *tries[::12]]:
        check_found(graph, solution)
