"""Capped runs: what they report is valid, within the cap aimed at and as fast as asked; the same seed repeats."""

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import TABLE_3, random_problem, table_3
from testkit.solutions import finds, solution_in

from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.search.capped_run import LONGEST_RUN_MOVES, SHARES, CappedRun
from rlhfuse.schedule.search.solution import Objective

_, SERIAL, _, _, LEAST_MEMORY = TABLE_3[5]  # (8, 8, 8, 8): 15.6 is proved at the bound of latency


def run_of(problem, seed=1, number=1, latency=None):
    return CappedRun(build_graph(problem), Objective(problem, "memory", latency), seed, number)


def follow(run, best, rounds, moves, starts=()):
    """Every schedule reported in so many rounds."""
    improved = []
    for beaten, solution in finds(run, best, rounds, moves, starts):
        assert solution.makespan <= run.objective.key(beaten)[0] * (1 + 1e-8)
        assert solution.peak_memory <= loosen(run.cap) and solution.peak_memory < beaten.peak_memory
        improved.append(solution)
    return improved


@examples(30)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_what_a_run_reports_is_valid_fast_enough_and_within_its_cap(seed, number):
    problem = random_problem(seed)
    slow, fast = solution_in(serial_1f1b(problem)), solution_in(greedy(problem))
    follow(run_of(problem, seed, number, max(slow.makespan, fast.makespan)), fast, 12, 2000, [slow])


def test_it_comes_to_the_least_memory_in_few_jumps():
    """From greedy's at its makespan; each success goes most of the way to the bound at once."""
    best = solution_in(greedy(table_3(5)))
    assert best.peak_memory > 20
    improved = follow(run_of(table_3(5)), best, 200, 50_000)
    assert improved[-1].peak_memory <= LEAST_MEMORY + 1e-6 and len(improved) <= 4


def test_fruitless_runs_go_less_far_and_last_longer(monkeypatch):
    """Where the least memory is proved nothing can be found: the caps rise, twice over, and then it is exhausted."""
    run, best = run_of(table_3(5), latency=SERIAL), solution_in(serial_1f1b(table_3(5)))
    monkeypatch.setattr("rlhfuse.schedule.search.solution.memory_bound", lambda *_: 1.0)  # far too low
    caps, lengths, shares = [], [], len(SHARES)
    for _ in range(2 * shares):
        assert not run.exhausted
        run.spent = run.length  # as if the run before had ended
        assert run.advance(best, [], 1).solution is None
        caps.append(run.cap)
        lengths.append(run.length)
    run.spent = run.length
    run.advance(best, [], 1)
    assert run.exhausted
    assert caps[: shares - 1] == sorted(set(caps[: shares - 1])) and caps[:shares] == caps[shares:]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == LONGEST_RUN_MOVES * run.graph.size
