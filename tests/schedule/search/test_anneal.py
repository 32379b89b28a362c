"""The annealing kernel: a state that stays what it is computed to be afresh, and cycles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_greedy, check, random_problem

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.search.anneal import Rule, anneal
from rlhfuse.schedule.search.heads_tails import makespan_of, new_state, refresh
from rlhfuse.schedule.search.solution import schedule_of, sequence_of


@examples(25)
@given(st.integers(0, 10**6))
def test_incremental_state_stays_true(seed):
    """After many moves: heads, tails and levels as computed afresh, and a valid schedule."""
    problem = random_problem(seed, largest=5)
    graph = build_graph(problem)
    state = new_state(sequence_of(graph, capped_greedy(problem)), seed)
    epsilon = min(1e-9, float(graph.duration.min()) / 4)
    rule = Rule(np.full(problem.nodes, np.inf), 1.0, 0.3, 0.0, epsilon, 0.0)
    best = np.empty(graph.size, np.int64)
    anneal(graph.tables, state, rule, 5000, 2.0, 0.5, best, 1e9)
    head, tail, level, position = (a.copy() for a in (state.head, state.tail, state.level, state.position))
    assert refresh(graph.tables, state)
    np.testing.assert_allclose(head, state.head, atol=1e-9)
    np.testing.assert_allclose(tail, state.tail, atol=1e-9)
    np.testing.assert_allclose(level, state.level, atol=1e-9)
    np.testing.assert_array_equal(position, state.position)
    makespan, _ = check(problem, schedule_of(graph, state.sequence).orders)
    assert makespan_of(graph.tables, state) == pytest.approx(makespan)
