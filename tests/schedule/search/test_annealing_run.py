"""Annealing runs: what they report is valid, within the caps and better than asked; the same seed repeats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import TABLE_3, capped_halfway, random_problem, table_3
from testkit.solutions import check_found, finds, solution_in

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time, serial_1f1b
from rlhfuse.schedule.search.annealing_run import CAP_STEPS, AnnealingRun
from rlhfuse.schedule.search.solution import Objective

ROW, SERIAL, BOUND, _, LEAST_MEMORY = TABLE_3[2]  # (8, 4, 8, 4): 225 in 15.6, both proved


def run_of(problem, objective="memory", seed=1, number=0, latency=None):
    return AnnealingRun(build_graph(problem), Objective(problem, objective, latency), seed, number)


def table_3_run(*objective, **more):
    """A run of the row above, and greedy's schedule to begin with."""
    problem = table_3(2)
    return run_of(problem, *objective, **more), solution_in(greedy(problem))


def follow(run, best, rounds, moves, starts=(), late=False):
    """Every schedule reported in so many rounds: faster; or, once fast enough (or late), leaner and no slower."""
    improved = []
    for beaten, solution in finds(run, best, rounds, moves, starts, late):
        (makespan, peak), (old_makespan, old_peak) = run.objective.key(solution), run.objective.key(beaten)
        if run.objective.kind == "memory" and (late or run.objective.fast_enough(beaten.makespan)):
            assert makespan <= old_makespan * (1 + 1e-8) and peak < old_peak  # up to rounding
        else:
            assert makespan < old_makespan
        improved.append(solution)
    return improved


def falling_peaks(solutions):
    peaks = [solution.peak_memory for solution in solutions]
    assert peaks == sorted(set(peaks), reverse=True)
    return peaks


@examples(40)
@given(st.integers(0, 10**6), st.sampled_from(["latency", "memory"]), st.booleans(), st.booleans())
def test_what_a_run_reports_is_valid_and_better(seed, objective, late, capped):
    problem = capped_halfway(random_problem(seed)) if capped else random_problem(seed)
    start = solution_in(one_at_a_time(problem) if capped else serial_1f1b(problem))
    follow(run_of(problem, objective, seed), start, 12, 2000, [solution_in(greedy(problem))], late)


def test_it_goes_down_to_the_bound_and_then_to_the_least_memory():
    """From greedy's 239 in 23.6 to a proved optimum, by way of ever leaner schedules that are fast enough."""
    improved = follow(*table_3_run(), 200, 50_000)
    assert improved[-1].makespan == BOUND and improved[-1].peak_memory == pytest.approx(LEAST_MEMORY)
    reached = next(k for k, solution in enumerate(improved) if solution.makespan == BOUND)
    assert len(improved) - reached > 3, "no step in between: the case tests nothing"
    falling_peaks(improved[reached:])


def test_a_latency_to_keep_is_as_good_as_the_bound_and_is_spent():
    """Memory is improved from the first round on, at any makespan up to 309; 225 is not sought.

    Under a cap of 10 the search comes to 285 in 3 million moves: so 309 allows 10 at least.
    """
    improved = follow(*table_3_run(latency=SERIAL), 200, 50_000)
    assert all(BOUND < solution.makespan <= SERIAL for solution in improved)
    assert falling_peaks(improved)[-1] <= 10 < LEAST_MEMORY


def test_a_run_says_when_it_has_tried_everything():
    """One pipeline on one node: nothing can move; two rounds of all steps, the second twice as long."""
    problem = FusionProblem(1, (Pipeline("only", "only", (0,), 1, (1,), (2,), (1,)),))
    run, best, rounds = run_of(problem), solution_in(one_at_a_time(problem)), 0
    while not run.exhausted:
        assert run.advance(best, [], 10**6).solution is None
        rounds += 1
        assert rounds <= 2 * len(CAP_STEPS) + 1
    assert rounds > len(CAP_STEPS)
    run.advance(best._replace(peak_memory=2.0), [], 1)  # another schedule to beat: there is something to gain
    assert not run.exhausted


def meetings(run, best, peak):
    """What forty calls of `find_leaner` have found, fast enough."""
    found = [done.solution for done in (run.find_leaner(best, peak, 20_000) for _ in range(40)) if done.solution]
    for solution in found:
        check_found(run.graph, solution)
        assert solution.makespan <= run.objective.target * (1 + 1e-8)
    return found


def test_find_leaner_gives_fast_schedules_leaner_than_those_above():
    """At the best of its own level a run meets others: fast enough, leaner than what the next level has."""
    run, start = table_3_run()
    best = follow(run, start, 60, 50_000)[-1]
    assert best.makespan == BOUND == run.objective.target and best.peak_memory < 17.5
    for peak in (18.0, 17.55):
        found = meetings(run, best, peak)
        assert len({tuple(solution.sequence) for solution in found}) > 3
        assert all(solution.peak_memory < peak for solution in found)
