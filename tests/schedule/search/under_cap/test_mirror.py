"""Schedules made from their end are valid, fit and cost what they say; a split backward has no mirror."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_halfway, random_problem
from testkit.solutions import check_found

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.search.dispatch import Dispatcher, Rules
from rlhfuse.schedule.search.heads_tails import new_state, refresh
from rlhfuse.schedule.search.under_cap.mirror import Mirror


def whole(problem):
    pipelines = (replace(p, weight_gradient=None, weight_activation=None) for p in problem.pipelines)
    return replace(problem, pipelines=tuple(pipelines))


def rules_of(dispatcher, turn):
    return Rules(turn, dispatcher.any_time, dispatcher.any_window, dispatcher.unreserved)


@examples(60)
@given(st.integers(0, 10**6))
def test_what_comes_out_is_valid_and_fits(seed):
    graph = build_graph(capped_halfway(whole(random_problem(seed))))
    mirror = Mirror.of(graph)
    made = mirror.dispatch(rules_of(mirror.dispatcher, np.random.default_rng(seed).random(graph.size)), np.inf)
    check_found(graph, made)


@examples(40)
@given(st.integers(0, 10**6))
def test_the_aims_of_a_schedule_give_it_back_from_its_end(seed):
    """Latest starts, mirrored, are where the mirror's list scheduler has nothing to choose."""
    graph = build_graph(whole(random_problem(seed)))
    dispatcher, mirror = Dispatcher(graph), Mirror.of(graph)
    start = dispatcher.dispatch(rules_of(dispatcher, np.random.default_rng(seed).random(graph.size)))
    state = new_state(start.sequence, 1)
    refresh(graph.tables, state)
    aim = mirror.aims(start.makespan - state.tail - graph.duration, start.makespan)
    unbound = np.maximum(0.0, aim - 1e-6), mirror.dispatcher.any_window, mirror.dispatcher.unreserved
    again = mirror.dispatch(Rules(aim, *unbound), np.inf)
    assert again.sequence.tolist() == start.sequence.tolist()


def test_a_split_backward_has_no_mirror():
    problem = next(p for p in map(random_problem, range(50)) if any(q.split for q in p.pipelines))
    assert Mirror.of(build_graph(problem)) is None
