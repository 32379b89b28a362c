"""Extending steady states: units, levels, and that what comes out is valid, costs what it says and keeps a period."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_greedy, random_problem
from testkit.solutions import check_found, check_solution, solution_in

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.solution import schedule_of
from rlhfuse.schedule.search.steady_state import (
    FEWEST_UNITS,
    SteadyStateExtender,
    coarser_problem,
    period_of,
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


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_coarser_is_half_where_every_unit_costs_a_period_and_else_nothing(seed, units):
    problem = with_units(random_problem(seed), units)
    half = (units + 1) // 2
    small = coarser_problem(problem)
    added = latency_bound(problem) - latency_bound(with_units(problem, half))
    exact = added == pytest.approx((units - half) * period_of(problem), rel=3e-9)
    assert small == (with_units(problem, half) if half >= FEWEST_UNITS and exact else None)


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
