"""Annealing runs: what they report is valid, within the caps and better than asked; the same seed repeats."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.schedule_cases import TABLE_3, check, random_problem, table_3_problem

from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, min_memory, one_at_a_time, serial_1f1b
from rlhfuse.schedule.search.annealing_run import CAP_STEPS, AnnealingRun
from rlhfuse.schedule.search.solution import Incumbent, Objective, schedule_of, solution_of, tables_of

ROW, _, BOUND, _, LEAST_MEMORY = TABLE_3[2]  # (8, 4, 8, 4): 225 in 15.6, both proved


def run_of(problem, objective="memory", seed=1, number=0, latency=None):
    graph = build_graph(problem)
    return AnnealingRun(graph, tables_of(graph), Objective(problem, objective, latency), seed, number)


def solution_in(run, schedule):
    return solution_of(run.graph, Incumbent.of(schedule))


def check_found(run, solution):
    """`solution` is valid, costs what it says, and every node keeps its cap."""
    problem = run.graph.problem
    makespan, peaks = check(problem, schedule_of(run.graph, solution.sequence).orders)
    assert solution.makespan == pytest.approx(makespan, rel=1e-9)
    assert solution.peak_memory == pytest.approx(max(peaks), rel=1e-9, abs=1e-9)
    assert all(peak <= loosen(problem.node_cap(node)) for node, peak in enumerate(peaks))


def follow(run, best, rounds, moves, starts=(), late=False):
    """Every schedule reported in so many rounds; each is checked, and becomes the one to beat."""
    improved = []
    for _ in range(rounds):
        done = run.advance(best, list(starts), moves, late)
        assert 1 <= done.tried <= moves and 0 <= done.accepted <= done.tried
        if done.solution is not None:
            check_found(run, done.solution)
            beats(run, done.solution, best, late)
            best = done.solution
            improved.append(best)
    return improved


def beats(run, solution, best, late):
    """Faster; or, once fast enough (or late), leaner and, up to rounding, no slower."""
    (makespan, peak), (old_makespan, old_peak) = run.objective.key(solution), run.objective.key(best)
    if run.objective.kind == "memory" and (late or run.objective.fast_enough(best.makespan)):
        assert makespan <= old_makespan * (1 + 1e-8) and peak < old_peak
    else:
        assert makespan < old_makespan


# ---- what is reported -------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["latency", "memory"]), st.booleans(), st.booleans())
def test_what_a_run_reports_is_valid_and_better(seed, objective, late, capped):
    problem = random_problem(seed)
    if capped:  # between what one micro-batch at a time needs and what greedy takes, node by node
        taken = Incumbent.of(greedy(problem)).timeline.node_peak_memory
        problem = replace(problem, memory_cap=tuple((a + b) / 2 for a, b in zip(min_memory(problem), taken)))
    run = run_of(problem, objective, seed)
    start = solution_in(run, one_at_a_time(problem) if capped else serial_1f1b(problem))
    follow(run, start, 12, 2000, [solution_in(run, greedy(problem))], late)


def test_it_goes_down_to_the_bound_and_then_to_the_least_memory():
    """From greedy's 239 in 23.6 to a proved optimum, by way of ever leaner schedules that are fast enough."""
    run = run_of(table_3_problem(*ROW))
    best = solution_in(run, greedy(run.graph.problem))
    improved = follow(run, best, 200, 50_000)
    assert improved[-1].makespan == BOUND and improved[-1].peak_memory == pytest.approx(LEAST_MEMORY)
    reached = next(k for k, solution in enumerate(improved) if solution.makespan == BOUND)
    assert len(improved) - reached > 3, "no step in between: the case tests nothing"
    peaks = [solution.peak_memory for solution in improved[reached:]]
    assert peaks == sorted(set(peaks), reverse=True)


def test_without_the_memory_objective_nothing_is_leaner_only():
    run = run_of(table_3_problem(*ROW), "latency")
    makespans = [
        solution.makespan for solution in follow(run, solution_in(run, greedy(run.graph.problem)), 100, 50_000)
    ]
    assert makespans[-1] == BOUND and makespans == sorted(set(makespans), reverse=True)


def test_a_latency_to_keep_is_as_good_as_the_bound():
    """Memory is improved from the first round on, at any makespan up to 309; 225 is not sought."""
    run = run_of(table_3_problem(*ROW), latency=309)
    start = solution_in(run, greedy(run.graph.problem))
    improved = follow(run, start, 60, 20_000)
    assert all(BOUND < solution.makespan <= 309 for solution in improved)
    peaks = [solution.peak_memory for solution in improved]
    assert peaks == sorted(set(peaks), reverse=True) and peaks[-1] <= LEAST_MEMORY + 1e-6


def test_a_latency_to_keep_is_spent():
    """Under a cap of 10 the search comes to 285 in 3 million moves: so 309 allows 10 at least."""
    run = run_of(table_3_problem(*ROW), latency=309)
    improved = follow(run, solution_in(run, greedy(run.graph.problem)), 200, 50_000)
    assert improved[-1].makespan <= 309 and improved[-1].peak_memory <= 10


def test_late_in_a_search_memory_counts_at_any_makespan():
    """Greedy's 239 is not fast enough; when it is late its memory is improved all the same."""
    run = run_of(table_3_problem(*ROW))
    start = solution_in(run, greedy(run.graph.problem))
    assert not run.objective.fast_enough(start.makespan)
    improved = follow(run, start, 20, 20_000, late=True)
    assert improved[-1].peak_memory < start.peak_memory - 3


def test_a_cap_is_kept_from_a_start_above_it():
    """Greedy takes 23.6; the run may begin there, and what it reports keeps to 16."""
    problem = replace(table_3_problem(*ROW), memory_cap=16)
    run = run_of(problem, "latency")
    best = solution_in(run, one_at_a_time(problem))
    improved = follow(run, best, 40, 20_000, [solution_in(run, greedy(problem))])
    assert improved[-1].makespan < 309  # serial 1F1B


def test_caps_of_nodes_with_one_micro_batch_each():
    """No room for a second micro-batch anywhere: whatever is improved has one in flight per node."""
    problem = table_3_problem(4, 2, 4, 2, 1, 1, 1, 1)
    problem = replace(problem, memory_cap=1)
    run = run_of(problem, "latency")
    for solution in follow(run, solution_in(run, one_at_a_time(problem)), 20, 5000):
        assert solution.peak_memory == 1


# ---- when nothing is left ---------------------------------------------------------------------------------------


def test_a_run_says_when_it_has_tried_everything():
    """One pipeline on one node: nothing can move; two rounds of all steps, the second twice as long."""
    problem = FusionProblem(1, (Pipeline("only", "only", (0,), 1, (1,), (2,), (1,)),))
    run = run_of(problem)
    best = solution_in(run, one_at_a_time(problem))
    rounds = 0
    while not run.exhausted:
        assert run.advance(best, [], 10**6).solution is None
        rounds += 1
        assert rounds <= 2 * len(CAP_STEPS) + 1
    assert rounds > len(CAP_STEPS)
    run.advance(best._replace(peak_memory=2.0), [], 1)  # another schedule to beat: there is something to gain
    assert not run.exhausted


# ---- meeting others ---------------------------------------------------------------------------------------------


def test_find_leaner_gives_fast_schedules_leaner_than_those_above():
    """At the best of its own level a run meets others: fast enough, leaner than what the next level has."""
    run = run_of(table_3_problem(*ROW))
    best = follow(run, solution_in(run, greedy(run.graph.problem)), 60, 50_000)[-1]
    assert best.makespan == BOUND and best.peak_memory < 17.5
    for peak in (18.0, 17.55):
        improved = [done.solution for done in (run.find_leaner(best, peak, 20_000) for _ in range(40)) if done.solution]
        assert len({tuple(solution.sequence) for solution in improved}) > 3
        for solution in improved:
            check_found(run, solution)
            assert solution.makespan <= BOUND * (1 + 1e-8) and solution.peak_memory < peak


def test_find_leaner_without_a_peak_regards_no_memory_and_spends_the_latency():
    run = run_of(table_3_problem(*ROW), latency=BOUND + 10)
    best = follow(run, solution_in(run, greedy(run.graph.problem)), 30, 50_000)[-1]
    improved = [done.solution for done in (run.find_leaner(best, math.inf, 20_000) for _ in range(40)) if done.solution]
    for solution in improved:
        check_found(run, solution)
        assert solution.makespan <= (BOUND + 10) * (1 + 1e-8)
    assert max(solution.peak_memory for solution in improved) > best.peak_memory


# ---- seeds ------------------------------------------------------------------------------------------------------


def states(seed, number, rounds=6):
    """What a run holds after every round, and what it reports."""
    run = run_of(table_3_problem(*ROW), seed=seed, number=number)
    best, seen = solution_in(run, greedy(run.graph.problem)), []
    for _ in range(rounds):
        done = run.advance(best, [], 5000)
        best = done.solution or best
        seen.append((done.tried, done.accepted, best.makespan, best.peak_memory, tuple(run.state.sequence)))
    return seen


def test_same_seed_same_run_and_other_numbers_other_runs():
    first = states(3, 0)
    assert states(3, 0) == first
    others = [states(4, 0), states(3, 1), states(3, 2)]
    for k, other in enumerate(others):
        assert other[0][-1] != first[0][-1]
        assert all(other[0][-1] != another[0][-1] for another in others[:k])


def test_a_run_leaves_what_it_is_given():
    run = run_of(table_3_problem(*ROW))
    best = solution_in(run, greedy(run.graph.problem))
    start = solution_in(run, serial_1f1b(run.graph.problem))
    before = best.sequence.copy(), start.sequence.copy()
    follow(run, best, 5, 10_000, [start])
    assert np.array_equal(best.sequence, before[0]) and np.array_equal(start.sequence, before[1])
