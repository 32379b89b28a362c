"""What annealed admissions, and runs from the best alone, find under a cap fits and is better; a seed repeats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_halfway, random_problem, table_3
from testkit.solutions import check_found, solution_in

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import one_at_a_time
from rlhfuse.schedule.search.annealing_run import AnnealingRun
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.solution import Objective
from rlhfuse.schedule.search.under_cap.admissions import Admissions


def run_of(kind, problem, seed):
    """What advances from (best, moves), and its graph."""
    graph = build_graph(problem)
    if kind is Admissions:
        return Admissions(Dispatcher(graph), str(seed)).advance, graph
    run = AnnealingRun(graph, Objective(problem), seed)
    return lambda best, moves: run.advance(best, [], moves), graph


def finds(run, best, rounds, moves):
    """(the one to beat, what is found) of so many rounds; each is checked and becomes the one to beat."""
    advance, graph = run
    for _ in range(rounds):
        done = advance(best, moves)
        assert 1 <= done.tried <= moves
        if done.solution is not None:
            check_found(graph, done.solution)
            yield best, done.solution
            best = done.solution


@pytest.mark.parametrize("kind", [Admissions, AnnealingRun])
@examples(30)
@given(seed=st.integers(0, 10**6))
def test_what_is_found_is_valid_fits_and_is_faster(kind, seed):
    problem = capped_halfway(random_problem(seed))
    start = solution_in(one_at_a_time(problem))

    def found():
        return [(old, new) for old, new in finds(run_of(kind, problem, seed), start, 12, 3000)]

    pairs = found()
    assert all(new.makespan < old.makespan for old, new in pairs)
    assert [new[:2] for _, new in pairs] == [new[:2] for _, new in found()]


@pytest.mark.parametrize("kind", [Admissions, AnnealingRun])
def test_it_comes_down_from_one_at_a_time(kind):
    problem = table_3(2, memory_cap=8)
    start = solution_in(one_at_a_time(problem))
    best = [new for _, new in finds(run_of(kind, problem, 1), start, 60, 20_000)][-1]
    assert best.makespan < 0.6 * start.makespan
