"""One rank's worker: its levels, its rounds, and that whatever it finds is valid, within the caps and better."""

from dataclasses import replace
from itertools import combinations
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import TABLE_3, capped_halfway, random_problem, table_3, table_3_problem
from testkit.solutions import check_found

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import reaches
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import greedy, min_memory, one_at_a_time
from rlhfuse.schedule.search.solution import Incumbent, Objective, schedule_of
from rlhfuse.schedule.search.steady_state import units_of, with_units
from rlhfuse.schedule.search.worker import SearchWorker

TWO_LEVELS = table_3_problem(4, 2, 16, 8, 1, 1, 2, 1)  # 8 units and 4: 75 and 39 ticks


def worker_of(problem, objective="memory", latency=None, seed=1, rank=0):
    """A worker, and the incumbents that a search would give it, the best first."""
    starts = [Incumbent.of(greedy(problem))]
    if not starts[0].fits():
        starts.append(Incumbent.of(one_at_a_time(problem)))
    worker = SearchWorker(build_graph(problem), Objective(problem, objective, latency), starts, seed, rank)
    return worker, starts[-1]


def play(worker, best, rounds, moves=2000, share=0.0):
    """(the best, makespan and peak memory of every find) after so many rounds; each find is checked."""
    top, keys = worker.levels[-1], []
    for k in range(rounds):
        before = [level.objective.key(level.best) for level in worker.levels]
        done = worker.round(best, moves, share)
        assert 1 <= done.tried <= moves and 0 <= done.accepted <= done.tried
        if k:  # in the first round the top takes over the incumbent that it is given
            assert not any(worse(level.objective.key(level.best), key) for level, key in zip(worker.levels, before))
        if done.solution is None:
            continue
        check_found(top.graph, done.solution)
        solution = Incumbent.of(schedule_of(top.graph, done.solution.sequence))
        assert top.objective.key(solution.timeline) < top.objective.key(best.timeline)
        best = solution
        keys.append(top.objective.key(best.timeline))
    for level in worker.levels:
        check_found(level.graph, level.best)
    assert keys == sorted(keys, reverse=True)
    return best, keys


def worse(key, before):
    """By more than rounding."""
    return not reaches(key[0], before[0]) or (reaches(before[0], key[0]) and not reaches(key[1], before[1] + 1e-9))


@pytest.mark.parametrize("row, units", [(9, [32, 64]), (6, [8, 16, 32]), (0, [8, 16]), (2, [4]), (11, [16])])
def test_levels_are_where_they_are_exact(row, units):
    problem = table_3(row)
    worker, _ = worker_of(problem)
    assert [units_of(level.objective.problem) for level in worker.levels] == units
    assert [level.objective.problem for level in worker.levels] == [with_units(problem, count) for count in units]
    assert len(worker.extenders) == len(units) - 1
    for level in worker.levels:
        assert level.graph.problem == level.objective.problem and level.objective.kind == "memory"
        assert level.objective.latency is None
        check_found(level.graph, level.best)


def test_every_level_has_as_much_slack_as_the_one_above():
    _, _, bound, *_ = TABLE_3[6]
    for slack in (0, 7, 100):
        worker, _ = worker_of(table_3(6), latency=bound + slack)
        for level in worker.levels:
            left_out = 32 - units_of(level.objective.problem)
            assert level.objective.latency == level.objective.target == bound + slack - 18 * left_out
            assert level.objective.latency_bound == level.objective.latency - slack


@examples(40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(["latency", "memory", "slack"]), st.booleans())
def test_whatever_a_worker_finds_checks_out(seed, units, objective, capped):
    """Random problems of several units, so that some have levels below; caps between one micro-batch's and greedy's."""
    problem = with_units(random_problem(seed, largest=3), units)
    problem = capped_halfway(problem) if capped else problem
    latency = latency_bound(problem) * 1.1 if objective == "slack" else None
    worker, best = worker_of(problem, "latency" if objective == "latency" else "memory", latency, seed, seed % 3)
    play(worker, best, 8, 1500, share=(seed % 11) / 10)


@pytest.mark.parametrize("objective", ["latency", "memory"])
def test_a_worker_of_two_levels_comes_down(objective):
    """Its levels take turns; neither the top nor any other ever gets worse."""
    worker, start = worker_of(TWO_LEVELS, objective)
    assert [units_of(level.objective.problem) for level in worker.levels] == [4, 8]
    best, keys = play(worker, start, 120, 5000)
    assert best.timeline.makespan == latency_bound(TWO_LEVELS) == 75 and keys
    assert objective == "latency" or best.timeline.peak_memory <= 9


def test_the_owners_best_becomes_the_one_to_beat():
    """What another rank has solution stands at the top from the next round on."""
    worker, start = worker_of(TWO_LEVELS)
    elsewhere, _ = play(*worker_of(TWO_LEVELS, seed=2, rank=1), 120, 5000)
    play(worker, start, 2, 100)
    worker.round(elsewhere, 100, 0.0)
    top = worker.levels[-1]
    assert top.objective.key(top.best) <= top.objective.key(elsewhere.timeline)


def test_a_cap_that_only_one_micro_batch_at_a_time_meets():
    """No start made by rule fits; the worker begins with what is given and stays below the cap."""
    problem = table_3_problem(4, 2, 8, 4, 1, 1, 1, 1)
    problem = replace(problem, memory_cap=max(min_memory(problem)))
    worker, best = worker_of(problem, "latency")
    assert best.schedule == one_at_a_time(problem)
    solution, _ = play(worker, best, 30, 5000)
    assert solution.timeline.node_peak_memory == (1, 1, 1, 1)
    assert solution.timeline.makespan <= best.timeline.makespan


def test_under_a_tight_cap_all_ways_take_turns():
    """Few units, polishing and admissions: what comes out is as fast as what rules made."""
    problem = table_3_problem(4, 2, 32, 16, 1, 1, 1, 1)
    problem = replace(problem, memory_cap=max(min_memory(problem)) * 2)
    with patch("rlhfuse.schedule.search.steady_state.CAPPED_OPERATIONS", 150):
        worker, start = worker_of(problem, "latency")
    small, top = worker.levels
    assert top.tight and small.tight and units_of(small.objective.problem) == 6
    ruled = top.best.makespan
    best, _ = play(worker, start, 60, 20_000)
    assert best.timeline.makespan <= ruled
    assert min(worker.work) > 0 and top.admissions.spent > 0 and top.run.spent > 0


def test_same_seed_and_rank_same_rounds():
    def rounds(seed, rank):
        worker, best = worker_of(TWO_LEVELS, seed=seed, rank=rank)
        best, keys = play(worker, best, 20, 3000)
        runs = [run for level in worker.levels for run in (level.run, level.capped) if run.state is not None]
        return keys, best.schedule.orders, [tuple(run.state.sequence) for run in runs]

    first, others = rounds(1, 0), [rounds(2, 0), rounds(1, 1), rounds(1, 2)]
    assert rounds(1, 0) == first and rounds(1, 1) == others[1]
    assert all(one[2][0] != other[2][0] for one, other in combinations([first, *others], 2))
