"""One rank's worker: its levels, its rounds, and that whatever it finds is valid, within the caps and better."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_halfway, random_problem, table_3_problem
from testkit.solutions import check_found

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import reaches
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time
from rlhfuse.schedule.search.solution import Incumbent, Objective, schedule_of
from rlhfuse.schedule.search.steady_state import with_units
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


@examples(40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(["latency", "memory", "slack"]), st.booleans())
def test_whatever_a_worker_finds_checks_out(seed, units, objective, capped):
    """Random problems of several units, so that some have levels below; caps between one micro-batch's and greedy's."""
    problem = with_units(random_problem(seed, largest=3), units)
    problem = capped_halfway(problem) if capped else problem
    latency = latency_bound(problem) * 1.1 if objective == "slack" else None
    worker, best = worker_of(problem, "latency" if objective == "latency" else "memory", latency, seed, seed % 3)
    play(worker, best, 8, 1500, share=(seed % 11) / 10)


def test_same_seed_and_rank_same_rounds():
    def rounds(seed, rank):
        worker, best = worker_of(TWO_LEVELS, seed=seed, rank=rank)
        best, keys = play(worker, best, 20, 3000)
        runs = [run for level in worker.levels for run in (level.run, level.capped) if run.state is not None]
        return keys, best.schedule.orders, [tuple(run.state.sequence) for run in runs]

    first, others = rounds(1, 0), [rounds(2, 0), rounds(1, 1), rounds(1, 2)]
    assert rounds(1, 0) == first and rounds(1, 1) == others[1]
    assert all(one[2][0] != other[2][0] for one, other in combinations([first, *others], 2))
