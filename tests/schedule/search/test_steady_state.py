"""Extending steady states: units, levels, and that what comes out is valid, costs what it says and keeps a period."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.schedule_cases import TABLE_3, capped_greedy, check, random_problem, table_3_problem

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.solution import Solution, schedule_of, sequence_of, tables_of
from rlhfuse.schedule.search.steady_state import (
    FEWEST_UNITS,
    SteadyStateExtender,
    coarser_problem,
    period_of,
    units_of,
    with_units,
)

BUILDERS = (greedy, capped_greedy, serial_1f1b)


def extender_of(small, large):
    graphs = build_graph(small), build_graph(large)
    dispatcher = Dispatcher(graphs[1], tables_of(graphs[1]))
    return SteadyStateExtender(graphs[0], tables_of(graphs[0]), dispatcher), graphs[1]


def solution_in(schedule):
    timeline = evaluate(schedule)
    sequence = sequence_of(build_graph(schedule.problem), schedule)
    return Solution(float(timeline.makespan), float(timeline.peak_memory), sequence)


def extended(schedule, large, better=lambda solution: True, tries=96):
    """(best that fits and is better, fastest, all that was tried: about `tries`, graph of the large problem)."""
    extender, graph = extender_of(schedule.problem, large)
    made = []

    def asked(solution):
        made.append(solution)
        return better(solution)

    with patch("rlhfuse.schedule.search.steady_state.TRIED_OPERATIONS", tries * graph.size):
        return *extender.extend(solution_in(schedule), asked), made, graph


def one_pipeline(microbatches, stages=4):
    nodes = tuple(range(stages))
    times = (1,) * stages, (2,) * stages, (1.5,) * stages
    return FusionProblem(stages, (Pipeline("actor", "actor", nodes, microbatches, *times),))


# ---- units and levels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, units, period", [(TABLE_3[0][0], 16, 42), (TABLE_3[6][0], 32, 18), (TABLE_3[9][0], 64, 9)], ids=str
)
def test_a_unit_of_table_3(row, units, period):
    problem = table_3_problem(*row)
    assert (units_of(problem), period_of(problem)) == (units, period)
    halved = with_units(problem, units // 2)
    assert [p.microbatches for p in halved.pipelines] == [p.microbatches // 2 for p in problem.pipelines]
    assert with_units(halved, units) == problem


@settings(derandomize=True, deadline=None, max_examples=100)
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


@settings(derandomize=True, deadline=None, max_examples=60)
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
    chosen = {row: coarser_problem(table_3_problem(*row)) for row, *_ in TABLE_3}
    levels = {row: units_of(small) if small else 0 for row, small in chosen.items()}
    assert list(levels.values()) == [8, 0, 0, 16, 0, 0, 16, 8, 0, 32, 0, 0]
    for (row, _, bound, *_), small in zip(TABLE_3, chosen.values()):
        problem = table_3_problem(*row)
        if small is not None:
            left_out = units_of(problem) - units_of(small)
            assert latency_bound(small) + left_out * period_of(problem) == bound
    problem = table_3_problem(*TABLE_3[5][0])  # half of (8, 8, 8, 8): 4 units, not too few, but 141 + 4 * 21 < 225
    assert latency_bound(with_units(problem, 4)) + 4 * 21 != latency_bound(problem)
    assert coarser_problem(one_pipeline(7)) == one_pipeline(4) and coarser_problem(one_pipeline(6)) is None


# ---- what comes out ---------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.sampled_from(BUILDERS))
def test_what_comes_out_is_valid_and_costs_what_it_says(seed, units, added, builder):
    """Exact levels or not, periodic or not, any placement, lags and split backwards: all tries are schedules."""
    problem = random_problem(seed)
    small, large = with_units(problem, units), with_units(problem, units + added)
    lifted, fastest, tries, graph = extended(builder(small), large)
    assert len(tries) == 96 and any(lifted is solution for solution in tries)
    assert fastest.makespan == min(solution.makespan for solution in tries)
    for solution in [lifted, fastest, *tries[:: len(tries) // 6]]:
        makespan, peaks = check(large, schedule_of(graph, solution.sequence).orders)
        assert solution.makespan == pytest.approx(makespan, rel=1e-9)
        assert solution.peak_memory == pytest.approx(max(peaks), rel=1e-9)


@pytest.mark.parametrize("small, large", [(8, 16), (8, 9), (5, 64), (12, 23)])
def test_1f1b_extends_to_its_bound_in_the_same_memory(small, large):
    start = serial_1f1b(one_pipeline(small))
    before = evaluate(start)
    assert before.makespan == latency_bound(start.problem) == 9 + 3 * small
    lifted, fastest, _, graph = extended(start, one_pipeline(large))
    assert lifted.makespan == fastest.makespan == latency_bound(graph.problem) == 9 + 3 * large
    assert lifted.peak_memory == before.peak_memory == 6
    assert evaluate(schedule_of(graph, lifted.sequence)).node_peak_memory == before.node_peak_memory


def test_the_middle_of_1f1b_is_repeated_as_it_is():
    """What it makes of 1F1B of 8 micro-batches is 1F1B of 16."""
    lifted, _, _, graph = extended(serial_1f1b(one_pipeline(8)), one_pipeline(16))
    assert schedule_of(graph, lifted.sequence).orders == serial_1f1b(one_pipeline(16)).orders


@pytest.mark.parametrize(
    "row, extra, before, after",
    [((4, 2, 8, 4, 1, 1, 2, 1), 0, (39, 9), (75, 9)), ((4, 2, 16, 8, 1, 2, 2, 1), 1, (102, 12), (198, 12))],
    ids=str,
)
def test_a_fused_schedule_at_its_bound_extends_to_the_next_bound(row, extra, before, after):
    """Three pipelines on four nodes, by capped greedy."""
    small = table_3_problem(*row)
    large = with_units(small, 2 * units_of(small))
    start = capped_greedy(small, extra)
    assert coarser_problem(large) == small and solution_in(start)[:2] == before and before[0] == latency_bound(small)
    lifted, _, _, graph = extended(start, large)
    makespan, peaks = check(large, schedule_of(graph, lifted.sequence).orders)
    assert (makespan, max(peaks)) == lifted[:2] == after and after[0] == latency_bound(large)


# ---- what is asked for ------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_best_of_the_tries_within_every_nodes_cap(seed, choice):
    """Caps halfway between the peaks of two tries, node by node: some fit and some do not, or none."""
    problem = random_problem(seed)
    start, large = greedy(with_units(problem, 2)), with_units(problem, 5)
    _, _, tries, graph = extended(start, large)
    peaks = [evaluate(schedule_of(graph, solution.sequence)).node_peak_memory for solution in tries]
    a, b = peaks[choice % len(peaks)], peaks[choice // 7 % len(peaks)]
    capped = replace(large, memory_cap=tuple((x + y) / 2 for x, y in zip(a, b)))
    lifted, fastest, again, _ = extended(start, capped)
    assert [solution[:2] for solution in again] == [solution[:2] for solution in tries]
    fitting = [f[:2] for f, p in zip(tries, peaks) if all(x <= c + 1e-9 for x, c in zip(p, capped.memory_cap))]
    assert (lifted[:2] if lifted else None) == min(fitting, default=None)
    assert fastest.makespan == min(solution.makespan for solution in tries)  # it may be above the caps


def test_a_cap_of_one_node_alone_is_kept():
    """Greedy holds more on some node than 1F1B does: a cap there decides, one elsewhere does not."""
    problem = table_3_problem(*TABLE_3[2][0])
    start, large = greedy(problem), with_units(problem, 6)
    lifted, _, _, graph = extended(start, large)
    peaks = evaluate(schedule_of(graph, lifted.sequence)).node_peak_memory
    node = int(np.argmax(peaks))
    for cap, same in ((peaks[node], True), (peaks[node] - 0.5, False)):
        caps = [math.inf] * 8
        caps[node] = cap
        capped = replace(large, memory_cap=tuple(1e9 if math.isinf(c) else c for c in caps), static_memory=0)
        kept = extended(start, capped)[0]
        assert (kept is not None and kept[:2] == lifted[:2]) is same
        assert kept is None or evaluate(schedule_of(graph, kept.sequence)).node_peak_memory[node] <= cap + 1e-9


def test_static_memory_counts_against_the_cap():
    start, large = serial_1f1b(one_pipeline(8)), one_pipeline(16)
    for static, fits in ((4, True), (4.1, False)):
        capped = replace(large, memory_cap=10, static_memory=static)
        lifted, fastest, *_ = extended(start, capped)
        assert (lifted is not None and lifted.makespan == 57) is fits
        assert fastest.makespan == 57


def test_only_what_is_better_is_lifted():
    start, large = serial_1f1b(one_pipeline(8)), one_pipeline(16)
    lifted, fastest, *_ = extended(start, large, better=lambda solution: solution.makespan < 57)
    assert lifted is None and fastest.makespan == 57
