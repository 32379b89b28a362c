"""Schedules by admission rules: valid, within the caps, the same for a seed, no slower with more decodes."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_halfway, random_problem, table_3
from testkit.solutions import check_found

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.search.admission_rules import AdmissionRules, reached_by_rule
from rlhfuse.schedule.search.dispatch import KEPT, Dispatcher


def reach(problem, tries, seed=1):
    return AdmissionRules(Dispatcher(build_graph(problem)), str(seed)).search(tries)


@examples(60)
@given(st.integers(0, 10**6), st.booleans())
def test_what_is_reached_is_valid_and_fits(seed, capped):
    problem = capped_halfway(random_problem(seed, models=3)) if capped else random_problem(seed, models=3)
    solutions = reach(problem, 60, seed)
    assert 1 <= len(solutions) <= KEPT
    for solution in solutions:
        check_found(build_graph(problem), solution)
    makespans = [solution.makespan for solution in solutions]
    assert makespans == sorted(set(makespans)) and math.isfinite(makespans[-1])
    again = reached_by_rule(problem, 60, seed)
    assert again[:2] == solutions[0][:2] and again.sequence.tolist() == solutions[0].sequence.tolist()
    assert latency_bound(problem) <= again.makespan * (1 + 1e-9)


@examples(40)
@given(st.integers(0, 10**6))
def test_a_cap_that_nothing_can_break_changes_nothing(seed):
    """Above all micro-batches of all stages at once it goes, with the amounts; a little below it stays."""
    problem = random_problem(seed, models=3)
    most = [0.0] * problem.nodes
    for p in problem.pipelines:
        for stage, node in enumerate(p.placement):
            most[node] += p.microbatches * max(p.activation[stage], p.held_for_weights[stage])
    idle = replace(problem, memory_cap=tuple(held * (1 + 1e-9) for held in most))
    bare = idle.without_idle_cap()
    assert bare.memory_cap is None and not any(any(p.activation) for p in bare.pipelines)
    assert bare == problem.without_idle_cap()
    assert reached_by_rule(idle, 40).sequence.tolist() == reached_by_rule(bare, 40).sequence.tolist()
    tight = replace(problem, memory_cap=tuple(held * 0.99 for held in most))
    assert tight.without_idle_cap() == tight or not any(most)


def test_more_decodes_come_nearer_and_enough_ends_them():
    problem = table_3(1, memory_cap=12)
    few, more = (reached_by_rule(problem, tries).makespan for tries in (8, 600))
    assert latency_bound(problem) <= more < few
    assert reached_by_rule(problem, 600, enough=few).makespan == few
