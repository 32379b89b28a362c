"""The numba list scheduler against its plain twin in builders.py, and what it keeps."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import random_instance, random_problem, with_facts
from testkit.solutions import check_found, check_solution

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import list_schedule, min_memory
from rlhfuse.schedule.search.dispatch import (
    Dispatcher,
    Rules,
)
from rlhfuse.schedule.search.solution import schedule_of


def dispatcher_of(problem):
    return Dispatcher(build_graph(problem))


def drawn_problem(seed):
    """Draws from any family; every third one has stages that hold nothing."""
    rng = random.Random(seed)
    problem = random_problem(seed, models=3) if rng.random() < 0.5 else random_instance(seed)[1]
    if rng.random() < 2 / 3:
        return problem
    return with_facts(problem, lambda values: [value * rng.randint(0, 1) for value in values], ["activation"])


@examples(60)
@given(st.integers(0, 10**6))
def test_any_ranks_and_windows_give_the_plain_twins_schedule(seed):
    """Ranks and windows without sense: lanes in any order, windows from 1 to beyond the micro-batches."""
    problem = drawn_problem(seed)
    dispatcher, rng = dispatcher_of(problem), np.random.default_rng(seed)
    graph = dispatcher.graph
    rank = rng.permutation(len(graph.lanes))
    stages = [(p, s) for p, pipeline in enumerate(problem.pipelines) for s in range(pipeline.stages)]
    window = rng.integers(1, 7, len(stages))
    expected = list_schedule(graph, dict(zip(stages, window.tolist())), rank.tolist())
    rules = Rules(rank.astype(float)[graph.lane], dispatcher.any_time, window, dispatcher.unreserved)
    solution = dispatcher.dispatch(rules)
    assert schedule_of(graph, solution.sequence).orders == expected.orders
    check_solution(dispatcher.graph, solution)


def random_rules(dispatcher, seed):
    """Turns, times, windows, reserves and patience without sense."""
    rng, graph = np.random.default_rng(seed), dispatcher.graph
    stages = len(dispatcher.stages.node)
    earliest = np.maximum(0, rng.normal(0, graph.duration.sum() / 2, graph.size)) * rng.integers(0, 2)
    window = rng.integers(1, 6, stages) if rng.integers(0, 2) else dispatcher.any_window
    reserved = rng.integers(0, 2, len(graph.problem.pipelines)).astype(bool)[dispatcher.stages.pipeline]
    return Rules(rng.random(graph.size), earliest, window, reserved, rng.choice([0.0, 0.5, 1.0]))


def tight(problem, seed):
    """Caps on some nodes or all, from what one micro-batch at a time needs to twice that."""
    rng = random.Random(seed)
    caps = [least * rng.choice((1, 1, 1.2, 1.5, 2, 10)) for least in min_memory(problem)]
    return replace(problem, memory_cap=tuple(cap + 1 for cap in caps), static_memory=1)


@examples(150)
@given(st.integers(0, 10**6))
def test_under_caps_whatever_the_rules_all_is_placed_and_fits(seed):
    """Any placement, unequal times, lags, and splits that hold more or less for W: the schedule is whole and fits."""
    problem = tight(drawn_problem(seed), seed)
    dispatcher = dispatcher_of(problem)
    rules = random_rules(dispatcher, seed)
    for solution in (dispatcher.dispatch(rules), dispatcher.in_order(rules.turn), dispatcher.follow(rules.turn, 0.1)):
        check_found(dispatcher.graph, solution)
