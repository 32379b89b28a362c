"""One rank's chain: its levels, its rounds, and that whatever it finds is valid, within the caps and better."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import TABLE_3, check, random_problem, table_3_problem

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.objective import Goal, Incumbent, loosen, reaches
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.rules.min_memory import needed_memory, one_at_a_time
from rlhfuse.schedule.search.sequence import schedule_of
from rlhfuse.schedule.search.steady_state import units_of, with_units
from rlhfuse.schedule.search.worker import Chain

TWO_LEVELS = table_3_problem(4, 2, 16, 8, 1, 1, 2, 1)  # 8 units and 4: 75 and 39 ticks


def chain_of(problem, objective="memory", latency=None, seed=1, rank=0):
    """A chain, and the incumbents that a search would give it, the best first."""
    starts = [Incumbent.of(greedy(problem))]
    if not starts[0].fits():
        starts.append(Incumbent.of(one_at_a_time(problem)))
    chain = Chain(build_graph(problem), Goal(problem, objective, latency), starts, seed, rank)
    return chain, starts[-1]


def play(chain, best, rounds, moves=2000, share=0.0):
    """(the best, makespan and peak memory of every find) after so many rounds; each find is checked."""
    top, keys = chain.levels[-1], []
    for k in range(rounds):
        before = [level.goal.key(level.best) for level in chain.levels]
        done = chain.round(best, moves, share)
        assert 1 <= done.tried <= moves and 0 <= done.accepted <= done.tried
        if k:  # in the first round the top takes over the incumbent that it is given
            assert not any(worse(level.goal.key(level.best), key) for level, key in zip(chain.levels, before))
        if done.found is None:
            continue
        found = check_found(top, done.found)
        assert top.goal.key(found.timeline) < top.goal.key(best.timeline)
        best = found
        keys.append(top.goal.key(best.timeline))
    for level in chain.levels:
        check_found(level, level.best)
    assert keys == sorted(keys, reverse=True)
    return best, keys


def worse(key, before):
    """By more than rounding."""
    return not reaches(key[0], before[0]) or (reaches(before[0], key[0]) and not reaches(key[1], before[1] + 1e-9))


def check_found(level, found):
    """`found` as an incumbent: valid, costs what it says, and within every node's cap."""
    problem = level.goal.problem
    schedule = schedule_of(level.graph, found.sequence)
    makespan, peaks = check(problem, schedule.orders)
    assert found.makespan == pytest.approx(makespan, rel=1e-9)
    assert found.peak_memory == pytest.approx(max(peaks), rel=1e-9, abs=1e-9)
    assert all(peak <= loosen(problem.node_cap(node)) for node, peak in enumerate(peaks))
    return Incumbent.of(schedule)


# ---- levels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, units",
    [
        (TABLE_3[9][0], [32, 64]),
        (TABLE_3[6][0], [8, 16, 32]),
        (TABLE_3[0][0], [8, 16]),
        (TABLE_3[2][0], [4]),
        (TABLE_3[11][0], [16]),
    ],
    ids=str,
)
def test_levels_are_where_they_are_exact(row, units):
    problem = table_3_problem(*row)
    chain, _ = chain_of(problem)
    assert [units_of(level.goal.problem) for level in chain.levels] == units
    assert [level.goal.problem for level in chain.levels] == [with_units(problem, count) for count in units]
    assert len(chain.stretchers) == len(units) - 1
    for level in chain.levels:
        assert level.graph.problem == level.goal.problem and level.goal.objective == "memory"
        assert level.goal.latency is None
        check_found(level, level.best)


def test_every_level_has_as_much_slack_as_the_one_above():
    row, _, bound, *_ = TABLE_3[6]
    for slack in (0, 7, 100):
        chain, _ = chain_of(table_3_problem(*row), latency=bound + slack)
        for level in chain.levels:
            left_out = 32 - units_of(level.goal.problem)
            assert level.goal.latency == level.goal.enough == bound + slack - 18 * left_out
            assert level.goal.latency_bound == level.goal.latency - slack


def test_a_cap_counts_on_every_level():
    row, *_ = TABLE_3[9]
    problem = replace(table_3_problem(*row), memory_cap=tuple(range(20, 36)), static_memory=1)
    chain, best = chain_of(problem, "latency")
    for level in chain.levels:
        assert level.goal.problem.memory_cap == problem.memory_cap and level.goal.problem.static_memory == 1
    play(chain, best, 8, 20_000)


# ---- rounds -----------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(["latency", "memory", "slack"]), st.booleans())
def test_whatever_a_chain_finds_checks_out(seed, units, objective, capped):
    """Random problems of several units, so that some have levels below; caps between one micro-batch's and greedy's."""
    problem = with_units(random_problem(seed, largest=3), units)
    if capped:
        taken = evaluate(greedy(problem)).node_peak_memory
        problem = replace(problem, memory_cap=tuple((a + b) / 2 for a, b in zip(needed_memory(problem), taken)))
    latency = latency_bound(problem) * 1.1 if objective == "slack" else None
    chain, best = chain_of(problem, "latency" if objective == "latency" else "memory", latency, seed, seed % 3)
    play(chain, best, 8, 1500, share=(seed % 11) / 10)


@pytest.mark.parametrize("objective", ["latency", "memory"])
def test_a_chain_of_two_levels_comes_down(objective):
    """Its levels take turns; neither the top nor any other ever gets worse."""
    chain, start = chain_of(TWO_LEVELS, objective)
    assert [units_of(level.goal.problem) for level in chain.levels] == [4, 8]
    best, keys = play(chain, start, 120, 5000)
    assert best.timeline.makespan == latency_bound(TWO_LEVELS) == 75 and keys
    assert objective == "latency" or best.timeline.peak_memory <= 9


def test_the_first_round_gives_a_better_start_made_by_rule():
    """The owner's best is serial 1F1B; the chain's tuned starts beat it without a move."""
    problem = table_3_problem(*TABLE_3[2][0])
    start = Incumbent.of(serial_1f1b(problem))
    chain = Chain(build_graph(problem), Goal(problem), [start], 1, 0)
    done = chain.round(start, 1, 0.0)
    assert done.tried == 1 and done.found.makespan < start.timeline.makespan
    check_found(chain.levels[-1], done.found)


def test_the_owners_best_becomes_the_one_to_beat():
    """What another rank has found stands at the top from the next round on."""
    chain, start = chain_of(TWO_LEVELS)
    elsewhere, _ = play(*chain_of(TWO_LEVELS, seed=2, rank=1), 120, 5000)
    play(chain, start, 2, 100)
    chain.round(elsewhere, 100, 0.0)
    top = chain.levels[-1]
    assert top.goal.key(top.best) <= top.goal.key(elsewhere.timeline)


def test_a_cap_that_only_one_micro_batch_at_a_time_meets():
    """No start made by rule fits; the chain begins with what is given and stays below the cap."""
    problem = table_3_problem(4, 2, 8, 4, 1, 1, 1, 1)
    problem = replace(problem, memory_cap=max(needed_memory(problem)))
    chain, best = chain_of(problem, "latency")
    assert best.schedule == one_at_a_time(problem)
    found, _ = play(chain, best, 30, 5000)
    assert found.timeline.node_peak_memory == (1, 1, 1, 1)
    assert found.timeline.makespan <= best.timeline.makespan


def test_a_chain_without_a_schedule_that_fits_is_refused():
    problem = replace(table_3_problem(*TABLE_3[2][0]), memory_cap=2)
    with pytest.raises(ValueError):
        Chain(build_graph(problem), Goal(problem), [Incumbent.of(greedy(problem))], 1, 0)


# ---- seeds ------------------------------------------------------------------------------------------------------


def test_same_seed_and_rank_same_rounds():
    def rounds(seed, rank):
        chain, best = chain_of(TWO_LEVELS, seed=seed, rank=rank)
        best, keys = play(chain, best, 20, 3000)
        return keys, best.schedule.orders, [tuple(level.walk.state.sequence) for level in chain.levels]

    first = rounds(1, 0)
    assert rounds(1, 0) == first
    assert rounds(2, 0)[2] != first[2] and rounds(1, 1)[2] != first[2]
