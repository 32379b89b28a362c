"""The numba list scheduler against its plain twin in builders.py, its heap against heapq, and what it keeps."""

import heapq
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.schedule_cases import TABLE_3, capped_greedy, check, random_instance, random_problem, table_3_problem

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import list_schedule, pipeline_work
from rlhfuse.schedule.search.dispatch import (
    KEPT,
    LARGEST_EXTRAS,
    OTHER_EXTRAS,
    Dispatcher,
    Rules,
    heap_pop,
    heap_push,
    tuned_starts,
)
from rlhfuse.schedule.search.solution import schedule_of, tables_of

WAYS = [(forward_first, model_first) for forward_first in (True, False) for model_first in (True, False)]


def dispatcher_of(problem):
    graph = build_graph(problem)
    return Dispatcher(graph, tables_of(graph))


def drawn_problem(seed):
    """Of any family; every third one has stages that hold nothing."""
    rng = random.Random(seed)
    problem = random_problem(seed, models=3) if rng.random() < 0.5 else random_instance(seed)[1]
    if rng.random() < 2 / 3:
        return problem

    def emptied(pipeline):
        return replace(pipeline, activation=tuple(value * rng.randint(0, 1) for value in pipeline.activation))

    return replace(problem, pipelines=tuple(map(emptied, problem.pipelines)))


def check_solution(dispatcher, solution):
    """`solution` is valid and costs what it says."""
    problem = dispatcher.graph.problem
    makespan, peaks = check(problem, schedule_of(dispatcher.graph, solution.sequence).orders)
    assert solution.makespan == pytest.approx(makespan, rel=1e-9)
    assert solution.peak_memory == pytest.approx(max(peaks), rel=1e-9, abs=1e-9)


# ---- the heap ---------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(0, 5))), max_size=80))
def test_the_heap_gives_what_heapq_gives(steps):
    """Push a (key, item), or take out the smallest where the step is None; few values, so that many are equal."""
    keys, items, count, twin = np.empty(80), np.empty(80, np.int64), 0, []
    for step in steps + [None] * 80:
        if step is not None:
            count = heap_push(keys, items, count, float(step[0]), step[1])
            heapq.heappush(twin, step)
        elif twin:
            assert (keys[0], items[0]) == heapq.heappop(twin)
            count = heap_pop(keys, items, count)
        assert count == len(twin)
        assert not twin or (keys[0], items[0]) == twin[0]


def test_the_heap_sorts_what_it_holds():
    values = np.random.default_rng(0).integers(0, 40, (500, 2))
    keys, items, count = np.empty(500), np.empty(500, np.int64), 0
    for key, item in values:
        count = heap_push(keys, items, count, key / 8, item)
    out = []
    while count:
        out.append((keys[0], items[0]))
        count = heap_pop(keys, items, count)
    assert out == sorted((key / 8, item) for key, item in values.tolist())


# ---- the list scheduler -----------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_any_ranks_and_caps_give_the_plain_twins_schedule(seed):
    """Ranks and caps without sense: lanes in any order, caps from 1 to beyond the micro-batches."""
    problem = drawn_problem(seed)
    dispatcher, rng = dispatcher_of(problem), np.random.default_rng(seed)
    graph = dispatcher.graph
    rank = rng.permutation(len(graph.lanes))
    cap = rng.integers(1, 7, len(dispatcher.stages))
    expected = list_schedule(graph, dict(zip(dispatcher.stages, cap.tolist())), rank.tolist())
    solution = dispatcher.dispatch(Rules(rank, cap))
    assert schedule_of(graph, solution.sequence).orders == expected.orders
    check_solution(dispatcher, solution)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(LARGEST_EXTRAS), st.sampled_from(OTHER_EXTRAS), st.sampled_from(WAYS))
def test_the_rules_are_those_of_capped_greedy(seed, largest, others, way):
    """Every pipeline is of another model here, so that `capped_greedy` can be told the extra of each."""
    problem = drawn_problem(seed)
    problem = replace(problem, pipelines=tuple(replace(p, model=p.name) for p in problem.pipelines))
    large = max(problem.pipelines, key=pipeline_work)
    extra = {p.model: math.ceil((largest if p is large else others) * p.stages / 16) for p in problem.pipelines}
    dispatcher = dispatcher_of(problem)
    solution = dispatcher.dispatch(dispatcher.rules(largest, others, *way))
    assert schedule_of(dispatcher.graph, solution.sequence).orders == capped_greedy(problem, extra, *way).orders


@pytest.mark.parametrize("row", [TABLE_3[2][0], TABLE_3[11][0]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_pipelines_of_one_model_share_its_extra(row, way):
    problem = table_3_problem(*row)
    dispatcher = dispatcher_of(problem)
    for more in (-1, 0, 2):
        rules = dispatcher.rules(16 * more // row[0], 16 * more // row[1], *way)
        expected = capped_greedy(problem, {"actor": more, "critic": more}, *way)
        assert schedule_of(dispatcher.graph, dispatcher.dispatch(rules).sequence).orders == expected.orders


def test_a_dispatcher_forgets_what_it_made_before():
    dispatcher = dispatcher_of(table_3_problem(*TABLE_3[2][0]))
    first, second = dispatcher.rules(0, 8, True, False), dispatcher.rules(16, 0, False, True)
    alone = dispatcher.dispatch(first)
    dispatcher.dispatch(second)
    again = dispatcher.dispatch(first)
    assert again[:2] == alone[:2] and again.sequence.tolist() == alone.sequence.tolist()


# ---- the starts that are kept -----------------------------------------------------------------------------------


def grid(dispatcher):
    """Everything that the grid can give."""
    extras = itertools.product(LARGEST_EXTRAS, OTHER_EXTRAS, WAYS)
    return [dispatcher.dispatch(dispatcher.rules(largest, others, *way)) for largest, others, way in extras]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_tuned_starts_are_the_undominated_ones_of_the_grid(seed):
    dispatcher = dispatcher_of(random_problem(seed))
    starts, made = tuned_starts(dispatcher), grid(dispatcher)
    for solution in starts:
        check_solution(dispatcher, solution)
    costs = {solution[:2] for solution in made}
    undominated = {a for a in costs if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in costs)}
    assert [solution[:2] for solution in starts] == sorted(undominated)[:KEPT]


@pytest.mark.parametrize("row", [TABLE_3[2][0], TABLE_3[6][0], TABLE_3[9][0]], ids=str)
def test_tuned_starts_of_table_3(row):
    """Not all of the grid is tried where operations are many; what is tried first always is."""
    dispatcher = dispatcher_of(table_3_problem(*row))
    starts = tuned_starts(dispatcher)
    for solution in starts:
        check_solution(dispatcher, solution)
    assert 2 <= len(starts) <= KEPT
    for faster, leaner in zip(starts, starts[1:]):
        assert faster.makespan < leaner.makespan and faster.peak_memory > leaner.peak_memory
    first = dispatcher.dispatch(dispatcher.rules(LARGEST_EXTRAS[0], OTHER_EXTRAS[0], True, False))
    assert starts[0].makespan <= first.makespan
    assert starts[0].makespan < min(serial for case, serial, *_ in TABLE_3 if case == row)


def test_one_operation_each_is_enough():
    problem = FusionProblem(1, (Pipeline("only", "only", (0,), 1, (1,), (2,), (0,)),))
    dispatcher = dispatcher_of(problem)
    (solution,) = tuned_starts(dispatcher)
    assert solution[:2] == (3.0, 0.0) and solution.sequence.tolist() == [0, 1]
