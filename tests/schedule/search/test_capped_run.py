"""Capped runs: what they report is valid, within the cap aimed at and as fast as asked; the same seed repeats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.schedule_cases import TABLE_3, check, random_problem, table_3_problem

from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.search.capped_run import LONGEST_RUN_MOVES, SHARES, CappedRun
from rlhfuse.schedule.search.solution import Incumbent, Objective, schedule_of, solution_of, tables_of
from rlhfuse.schedule.search.worker import CoarseLevel

ROW, SERIAL, _, _, LEAST_MEMORY = TABLE_3[5]  # (8, 8, 8, 8): 15.6 is proved at the bound of latency


def run_of(problem, seed=1, number=1, latency=None):
    graph = build_graph(problem)
    return CappedRun(graph, tables_of(graph), Objective(problem, "memory", latency), seed, number)


def follow(run, best, rounds, moves, starts=()):
    """Every schedule reported in so many rounds; each is checked, and becomes the one to beat."""
    improved = []
    for _ in range(rounds):
        done = run.advance(best, list(starts), moves)
        assert 1 <= done.tried <= moves and 0 <= done.accepted <= done.tried
        if done.solution is None:
            continue
        makespan, peaks = check(run.graph.problem, schedule_of(run.graph, done.solution.sequence).orders)
        assert done.solution.makespan == pytest.approx(makespan, rel=1e-9)
        assert done.solution.peak_memory == pytest.approx(max(peaks), rel=1e-9, abs=1e-9)
        assert makespan <= run.objective.key(best)[0] * (1 + 1e-8)
        assert max(peaks) <= loosen(run.cap) and max(peaks) < best.peak_memory
        best = done.solution
        improved.append(best)
    return improved


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_what_a_run_reports_is_valid_fast_enough_and_within_its_cap(seed, number):
    problem = random_problem(seed)
    slow, fast = Incumbent.of(serial_1f1b(problem)), Incumbent.of(greedy(problem))
    run = run_of(problem, seed, number, max(slow.timeline.makespan, fast.timeline.makespan))
    follow(run, solution_of(run.graph, fast), 12, 2000, [solution_of(run.graph, slow)])


def test_it_comes_to_the_least_memory_in_few_jumps():
    """From greedy's at its makespan; each success goes most of the way to the bound at once."""
    run = run_of(table_3_problem(*ROW))
    best = solution_of(run.graph, Incumbent.of(greedy(run.graph.problem)))
    assert best.peak_memory > 20
    improved = follow(run, best, 200, 50_000)
    assert improved[-1].peak_memory <= LEAST_MEMORY + 1e-6 and len(improved) <= 4


def test_fruitless_runs_go_less_far_and_last_longer():
    """Where the least memory is proved nothing can be found: the caps rise, twice over, and then it is exhausted."""
    run = run_of(table_3_problem(*ROW), latency=SERIAL)
    best = solution_of(run.graph, Incumbent.of(serial_1f1b(run.graph.problem)))
    run.objective._memory_bounds[SERIAL] = 1.0  # a bound that is far too low
    caps, lengths = [], []
    for _ in range(2 * len(SHARES)):
        assert not run.exhausted
        run.spent = run.length  # as if the run before had ended
        assert run.advance(best, [], 1).solution is None
        caps.append(run.cap)
        lengths.append(run.length)
    run.spent = run.length
    run.advance(best, [], 1)
    assert run.exhausted
    assert (
        caps[: len(SHARES) - 1] == sorted(set(caps[: len(SHARES) - 1])) and caps[: len(SHARES)] == caps[len(SHARES) :]
    )
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == LONGEST_RUN_MOVES * run.graph.size


@pytest.mark.parametrize("number", [0, 1])
def test_the_same_seed_repeats(number):
    runs = [run_of(table_3_problem(*ROW), 3, number) for _ in range(2)]
    found = []
    for run in runs:
        best = solution_of(run.graph, Incumbent.of(greedy(run.graph.problem)))
        found.append(follow(run, best, 30, 50_000))
    assert found[0] and len(found[0]) == len(found[1])
    for one, other in zip(*found):
        assert one[:2] == other[:2] and np.array_equal(one.sequence, other.sequence)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_odd_numbers_make_capped_runs_at_once_others_when_a_step_has_failed(rank):
    problem = table_3_problem(*ROW)
    start = Incumbent.of(greedy(problem))
    objective = Objective(problem, "memory", start.timeline.makespan)
    level = CoarseLevel(build_graph(problem), objective, [start], 1, rank)
    assert level.fast_enough
    level.advance(1000, False)
    assert (level.capped.length > 0) == bool(rank)
    level.run.step = 1
    level.advance(1000, False)
    level.advance(1000, False)
    assert level.capped.length > 0
