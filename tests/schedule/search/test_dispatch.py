"""The numba list scheduler against its plain twin in builders.py, and what it keeps."""

import hashlib
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import TABLE_3, capped_greedy, random_instance, random_problem, table_3, with_facts
from testkit.solutions import check_found, check_solution

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import list_schedule, min_memory, pipeline_work
from rlhfuse.schedule.search.dispatch import (
    KEPT,
    LARGEST_EXTRAS,
    OTHER_EXTRAS,
    Dispatcher,
    Rules,
    tuned_starts,
)
from rlhfuse.schedule.search.solution import schedule_of

WAYS = [(forward_first, model_first) for forward_first in (True, False) for model_first in (True, False)]


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


@examples(40)
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


@pytest.mark.parametrize("number", [2, 11])
def test_pipelines_of_one_model_share_its_extra(number):
    problem, (actor, critic, *_) = table_3(number), TABLE_3[number][0]
    dispatcher = dispatcher_of(problem)
    for more, way in itertools.product((-1, 0, 2), WAYS):
        rules = dispatcher.rules(16 * more // actor, 16 * more // critic, *way)
        expected = capped_greedy(problem, {"actor": more, "critic": more}, *way)
        assert schedule_of(dispatcher.graph, dispatcher.dispatch(rules).sequence).orders == expected.orders


@examples(30)
@given(st.integers(0, 10**6))
def test_tuned_starts_are_the_undominated_ones_of_the_grid(seed):
    dispatcher = dispatcher_of(random_problem(seed))
    starts, grid = tuned_starts(dispatcher), itertools.product(LARGEST_EXTRAS, OTHER_EXTRAS, WAYS)
    for solution in starts:
        check_solution(dispatcher.graph, solution)
    costs = {dispatcher.dispatch(dispatcher.rules(largest, others, *way))[:2] for largest, others, way in grid}
    undominated = {a for a in costs if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in costs)}
    assert [solution[:2] for solution in starts] == sorted(undominated)[:KEPT]


@pytest.mark.parametrize("number, digest", [(2, "78c37b31306c709c"), (5, "b713f5c529b26369"), (8, "5b8a48a80f2cd602")])
def test_tuned_starts_are_the_same_to_the_operation(number, digest):
    """Recorded when no memory cap was regarded: without one nothing changes."""
    starts = tuned_starts(dispatcher_of(table_3(number)))
    arrays = [np.asarray(part).tobytes() for solution in starts for part in (solution.sequence, solution[:2])]
    assert hashlib.sha256(b"".join(arrays)).hexdigest()[:16] == digest


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


def test_what_is_refused_twice_in_a_row_still_waits_for_memory_elsewhere():
    """Two interleaved actors of 8 nodes each, whose W keeps more than F took, and a critic over all 16."""
    caps = [42289, 41936, 42313, 42673, 42745, 42817, 42817, 41394, 42001, 42152, 42224, 42152, 42308, 42745, 42745]
    ends: dict[str, tuple] = dict(forward=(*[12311] * 15, 13127), backward=(14506, *[13810] * 14, 16968))
    ends |= dict(activation=(1838,) * 16, weight_gradient=(11655,) * 16, weight_activation=(2376,) * 16)
    actors = [Pipeline(f"actor.{k}", "actor", (*range(8 * k, 8 * k + 8),) * 2, 13, **ends) for k in range(2)]
    down = (*reversed(range(16)),) * 2
    critic = Pipeline("critic", "critic", down, 26, (6154,) * 32, (13016, *[12321] * 31), (919,) * 32)
    dispatcher = dispatcher_of(FusionProblem(16, (*actors, critic), 3127, (*caps, 40844), 0))
    first = [3.0 * (lane.pipeline == 2) + "FBW".index(lane.kind.value) for lane in dispatcher.graph.lanes]
    numbers = [np.arange(lane.microbatches) / dispatcher.graph.size for lane in dispatcher.graph.lanes]
    turn = np.array(first)[dispatcher.graph.lane] + np.concatenate(numbers)
    rules = Rules(turn, dispatcher.any_time, dispatcher.any_window, dispatcher.unreserved)
    check_found(dispatcher.graph, dispatcher.dispatch(rules))


@examples(40)
@given(st.integers(0, 10**6))
def test_caps_that_hold_everything_change_nothing(seed):
    problem = drawn_problem(seed)
    wide = tuple(
        1.0 + sum(p.microbatches * sum(p.activation + p.held_for_weights) for p in problem.pipelines)
        for _ in range(problem.nodes)
    )
    for rules in (random_rules(dispatcher_of(problem), seed + k) for k in range(3)):
        free, capped = (dispatcher_of(p).dispatch(rules) for p in (problem, replace(problem, memory_cap=wide)))
        assert free.sequence.tolist() == capped.sequence.tolist()


@examples(30)
@given(st.integers(0, 10**6))
def test_a_schedule_later_than_the_limit_is_given_up(seed):
    dispatcher = dispatcher_of(tight(drawn_problem(seed), seed))
    rules = random_rules(dispatcher, seed)
    made = dispatcher.dispatch(rules)
    again = dispatcher.dispatch(rules, limit=made.makespan)
    assert again.makespan == made.makespan and again.sequence.tolist() == made.sequence.tolist()
    assert dispatcher.dispatch(rules, limit=made.makespan * (1 - 1e-6)).makespan == math.inf
