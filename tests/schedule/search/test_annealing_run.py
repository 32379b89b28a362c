"""Walks: what they report is valid, within the caps and better than asked; the same seed walks the same way."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import TABLE_3, check, random_problem, table_3_problem

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.objective import Goal, Incumbent, loosen
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.rules.min_memory import needed_memory, one_at_a_time
from rlhfuse.schedule.search.annealing_run import CAP_STEPS, Walk
from rlhfuse.schedule.search.sequence import Found, schedule_of, sequence_of, tables_of

ROW, _, BOUND, _, LEAST_MEMORY = TABLE_3[2]  # (8, 4, 8, 4): 225 in 15.6, both proved


def walk_of(problem, objective="memory", seed=1, number=0, latency=None):
    graph = build_graph(problem)
    return Walk(graph, tables_of(graph), Goal(problem, objective, latency), seed, number)


def found_of(walk, schedule):
    entry = Incumbent.of(schedule)
    timeline = entry.timeline
    return Found(float(timeline.makespan), float(timeline.peak_memory), sequence_of(walk.graph, schedule))


def check_found(walk, found):
    """`found` is valid, costs what it says, and every node keeps its cap."""
    problem = walk.graph.problem
    makespan, peaks = check(problem, schedule_of(walk.graph, found.sequence).orders)
    assert found.makespan == pytest.approx(makespan, rel=1e-9)
    assert found.peak_memory == pytest.approx(max(peaks), rel=1e-9, abs=1e-9)
    assert all(peak <= loosen(problem.node_cap(node)) for node, peak in enumerate(peaks))


def follow(walk, best, rounds, moves, starts=(), late=False):
    """Every schedule reported in so many rounds; each is checked, and becomes the one to beat."""
    met = []
    for _ in range(rounds):
        done = walk.advance(best, list(starts), moves, late)
        assert 1 <= done.tried <= moves and 0 <= done.accepted <= done.tried
        if done.found is not None:
            check_found(walk, done.found)
            beats(walk, done.found, best, late)
            best = done.found
            met.append(best)
    return met


def beats(walk, found, best, late):
    """Faster; or, once fast enough (or late), leaner and, up to rounding, no slower."""
    (makespan, peak), (old_makespan, old_peak) = walk.goal.key(found), walk.goal.key(best)
    if walk.goal.objective == "memory" and (late or walk.goal.fast_enough(best.makespan)):
        assert makespan <= old_makespan * (1 + 1e-8) and peak < old_peak
    else:
        assert makespan < old_makespan


# ---- what is reported -------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["latency", "memory"]), st.booleans(), st.booleans())
def test_what_a_walk_reports_is_valid_and_better(seed, objective, late, capped):
    problem = random_problem(seed)
    if capped:  # between what one micro-batch at a time needs and what greedy takes, node by node
        taken = Incumbent.of(greedy(problem)).timeline.node_peak_memory
        problem = replace(problem, memory_cap=tuple((a + b) / 2 for a, b in zip(needed_memory(problem), taken)))
    walk = walk_of(problem, objective, seed)
    start = found_of(walk, one_at_a_time(problem) if capped else serial_1f1b(problem))
    follow(walk, start, 12, 2000, [found_of(walk, greedy(problem))], late)


def test_it_walks_down_to_the_bound_and_then_to_the_least_memory():
    """From greedy's 239 in 23.6 to a proved optimum, by way of ever leaner schedules that are fast enough."""
    walk = walk_of(table_3_problem(*ROW))
    best = found_of(walk, greedy(walk.graph.problem))
    met = follow(walk, best, 200, 50_000)
    assert met[-1].makespan == BOUND and met[-1].peak_memory == pytest.approx(LEAST_MEMORY)
    reached = next(k for k, found in enumerate(met) if found.makespan == BOUND)
    assert len(met) - reached > 3, "no step in between: the case tests nothing"
    peaks = [found.peak_memory for found in met[reached:]]
    assert peaks == sorted(set(peaks), reverse=True)


def test_without_the_memory_objective_nothing_is_leaner_only():
    walk = walk_of(table_3_problem(*ROW), "latency")
    makespans = [found.makespan for found in follow(walk, found_of(walk, greedy(walk.graph.problem)), 100, 50_000)]
    assert makespans[-1] == BOUND and makespans == sorted(set(makespans), reverse=True)


def test_a_latency_to_keep_is_as_good_as_the_bound():
    """Memory is improved from the first round on, at any makespan up to 309; 225 is not sought."""
    walk = walk_of(table_3_problem(*ROW), latency=309)
    start = found_of(walk, greedy(walk.graph.problem))
    met = follow(walk, start, 60, 20_000)
    assert all(BOUND < found.makespan <= 309 for found in met)
    peaks = [found.peak_memory for found in met]
    assert peaks == sorted(set(peaks), reverse=True) and peaks[-1] <= LEAST_MEMORY + 1e-6


def test_a_latency_to_keep_is_spent():
    """Under a cap of 10 the search comes to 285 in 3 million moves: so 309 allows 10 at least."""
    walk = walk_of(table_3_problem(*ROW), latency=309)
    met = follow(walk, found_of(walk, greedy(walk.graph.problem)), 200, 50_000)
    assert met[-1].makespan <= 309 and met[-1].peak_memory <= 10


def test_late_in_a_search_memory_counts_at_any_makespan():
    """Greedy's 239 is not fast enough; when it is late its memory is improved all the same."""
    walk = walk_of(table_3_problem(*ROW))
    start = found_of(walk, greedy(walk.graph.problem))
    assert not walk.goal.fast_enough(start.makespan)
    met = follow(walk, start, 20, 20_000, late=True)
    assert met[-1].peak_memory < start.peak_memory - 3


def test_a_cap_is_walked_under_from_a_start_above_it():
    """Greedy takes 23.6; the walk may begin there, and what it reports keeps to 16."""
    problem = replace(table_3_problem(*ROW), memory_cap=16)
    walk = walk_of(problem, "latency")
    best = found_of(walk, one_at_a_time(problem))
    met = follow(walk, best, 40, 20_000, [found_of(walk, greedy(problem))])
    assert met[-1].makespan < 309  # serial 1F1B


def test_caps_of_nodes_with_one_micro_batch_each():
    """No room for a second micro-batch anywhere: whatever is met has one in flight per node."""
    problem = table_3_problem(4, 2, 4, 2, 1, 1, 1, 1)
    problem = replace(problem, memory_cap=1)
    walk = walk_of(problem, "latency")
    for found in follow(walk, found_of(walk, one_at_a_time(problem)), 20, 5000):
        assert found.peak_memory == 1


# ---- when nothing is left ---------------------------------------------------------------------------------------


def test_a_walk_says_when_it_has_tried_everything():
    """One pipeline on one node: nothing can move; two rounds of all steps, the second twice as long."""
    problem = FusionProblem(1, (Pipeline("only", "only", (0,), 1, (1,), (2,), (1,)),))
    walk = walk_of(problem)
    best = found_of(walk, one_at_a_time(problem))
    rounds = 0
    while not walk.exhausted:
        assert walk.advance(best, [], 10**6).found is None
        rounds += 1
        assert rounds <= 2 * len(CAP_STEPS) + 1
    assert rounds > len(CAP_STEPS)
    walk.advance(best._replace(peak_memory=2.0), [], 1)  # another schedule to beat: there is something to gain
    assert not walk.exhausted


# ---- meeting others ---------------------------------------------------------------------------------------------


def test_meet_gives_fast_schedules_leaner_than_those_above():
    """At the best of its own level a walk meets others: fast enough, leaner than what the next level has."""
    walk = walk_of(table_3_problem(*ROW))
    best = follow(walk, found_of(walk, greedy(walk.graph.problem)), 60, 50_000)[-1]
    assert best.makespan == BOUND and best.peak_memory < 17.5
    for peak in (18.0, 17.55):
        met = [done.found for done in (walk.meet(best, peak, 20_000) for _ in range(40)) if done.found]
        assert len({tuple(found.sequence) for found in met}) > 3
        for found in met:
            check_found(walk, found)
            assert found.makespan <= BOUND * (1 + 1e-8) and found.peak_memory < peak


def test_meet_without_a_peak_regards_no_memory_and_spends_the_latency():
    walk = walk_of(table_3_problem(*ROW), latency=BOUND + 10)
    best = follow(walk, found_of(walk, greedy(walk.graph.problem)), 30, 50_000)[-1]
    met = [done.found for done in (walk.meet(best, math.inf, 20_000) for _ in range(40)) if done.found]
    for found in met:
        check_found(walk, found)
        assert found.makespan <= (BOUND + 10) * (1 + 1e-8)
    assert max(found.peak_memory for found in met) > best.peak_memory


# ---- seeds ------------------------------------------------------------------------------------------------------


def states(seed, number, rounds=6):
    """What a walk holds after every round, and what it reports."""
    walk = walk_of(table_3_problem(*ROW), seed=seed, number=number)
    best, seen = found_of(walk, greedy(walk.graph.problem)), []
    for _ in range(rounds):
        done = walk.advance(best, [], 5000)
        best = done.found or best
        seen.append((done.tried, done.accepted, best.makespan, best.peak_memory, tuple(walk.state.sequence)))
    return seen


def test_same_seed_same_walk_and_other_numbers_other_walks():
    first = states(3, 0)
    assert states(3, 0) == first
    others = [states(4, 0), states(3, 1), states(3, 2)]
    for k, other in enumerate(others):
        assert other[0][-1] != first[0][-1]
        assert all(other[0][-1] != another[0][-1] for another in others[:k])


def test_a_walk_leaves_what_it_is_given():
    walk = walk_of(table_3_problem(*ROW))
    best = found_of(walk, greedy(walk.graph.problem))
    start = found_of(walk, serial_1f1b(walk.graph.problem))
    before = best.sequence.copy(), start.sequence.copy()
    follow(walk, best, 5, 10_000, [start])
    assert np.array_equal(best.sequence, before[0]) and np.array_equal(start.sequence, before[1])
