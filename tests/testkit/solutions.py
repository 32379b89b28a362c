"""What a search finds, held against the checker that shares no code with the package."""

import pytest

from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.search.solution import Incumbent, schedule_of, solution_of
from testkit.schedule_cases import check


def solution_in(schedule):
    return solution_of(build_graph(schedule.problem), Incumbent.of(schedule))


def check_solution(graph, solution):
    """`solution` is valid and costs what it says; the peak memory of every node."""
    makespan, peaks = check(graph.problem, schedule_of(graph, solution.sequence).orders)
    assert solution.makespan == pytest.approx(makespan, rel=1e-9)
    assert solution.peak_memory == pytest.approx(max(peaks), rel=1e-9, abs=1e-9)
    return peaks


def check_found(graph, solution):
    """The same, and every node keeps its cap."""
    caps = map(graph.problem.node_cap, range(graph.problem.nodes))
    assert all(peak <= loosen(cap) for peak, cap in zip(check_solution(graph, solution), caps))


def finds(run, best, rounds, moves, starts=(), *more):
    """(the one to beat, what is found) of so many rounds of a run; each is checked and becomes the one to beat."""
    for _ in range(rounds):
        done = run.advance(best, list(starts), moves, *more)
        assert 1 <= done.tried <= moves and 0 <= done.accepted <= done.tried
        if done.solution is not None:
            check_found(run.graph, done.solution)
            yield best, done.solution
            best = done.solution
