"""Schedules made by rule against the closed forms of the papers; layouts turned into problems."""

import json
from dataclasses import replace
from itertools import product
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import capped_greedy, check, same_layout_problem

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b, serial_makespan
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b, interleaved_problem
from rlhfuse.schedule.rules.time_sharing import time_sharing


def even(nodes, microbatches, forward=1, backward=1, activation=1, model="a", reverse=False):
    """One pipeline of equal stages over nodes 0, 1, ..."""
    placement = tuple(range(nodes))[:: -1 if reverse else 1]
    times = (forward,) * nodes, (backward,) * nodes, (activation,) * nodes
    return Pipeline(model, model, placement, microbatches, *times)


def one_model(*facts, **more):
    pipeline = even(*facts, **more)
    return FusionProblem(pipeline.stages, (pipeline,))


def makespan(schedule):
    """By the checker, which must agree with `evaluate`."""
    found = check(schedule.problem, schedule.orders)[0]
    assert evaluate(schedule).makespan == pytest.approx(found)
    return found


@pytest.mark.parametrize("nodes, groups, chunks, backward", [*product([2, 3, 4, 8], [1, 2, 4], [2, 4], [4, 8])])
def test_interleaved_bubble(nodes, groups, chunks, backward):
    microbatches = groups * nodes
    problem = interleaved_problem(one_model(nodes, microbatches, 4, backward), chunks)
    schedule = interleaved_1f1b(problem)
    time, work = makespan(schedule), microbatches * (4 + backward)
    assert 1 - work / time == pytest.approx((nodes - 1) / (nodes - 1 + chunks * microbatches))
    for node, order in enumerate(schedule.orders):
        warm_up = next(i for i, action in enumerate(order) if action.kind == "B") - 1  # the steady state opens with F
        megatron = 2 * (nodes - node - 1) + (chunks - 1) * nodes
        if megatron < chunks * microbatches:
            assert warm_up == megatron
        else:
            assert all(action.kind == "F" for action in order[: chunks * microbatches])


def test_interleaved_order_is_megatrons():
    """Two nodes, two chunks, four micro-batches: chunk 0 of micro-batches 0 and 1, chunk 1 of them, and on."""
    problem = interleaved_problem(one_model(2, 4), 2)
    assert problem.pipelines[0].placement == (0, 1, 0, 1) and problem.pipelines[0].forward == (0.5,) * 4
    assert interleaved_1f1b(problem).text().splitlines() == [
        "node 0: a:0F0 a:0F1 a:2F0 a:2F1 a:0F2 a:2B0 a:0F3 a:2B1 a:2F2 a:0B0 a:2F3 a:0B1 a:2B2 a:2B3 a:0B2 a:0B3",
        "node 1: a:1F0 a:1F1 a:3F0 a:3B0 a:3F1 a:3B1 a:1F2 a:1B0 a:1F3 a:1B1 a:3F2 a:3B2 a:3F3 a:3B3 a:1B2 a:1B3",
    ]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: interleaved_problem(one_model(2, 2), 1), "chunks is 1"),
        (lambda: interleaved_problem(interleaved_problem(one_model(2, 2), 2), 2), "visits node 0 2 times"),
        (lambda: interleaved_1f1b(one_model(2, 2)), r"a with placement \[0, 1\] does not run over its nodes twice"),
        (
            lambda: interleaved_1f1b(FusionProblem(2, (replace(even(4, 2), placement=(0, 1, 1, 0)),))),
            "does not run over its nodes twice",
        ),
        (lambda: interleaved_1f1b(interleaved_problem(one_model(4, 6), 2)), "6 micro-batches on 4 nodes, 6 % 4 = 2"),
    ],
)
def test_what_cannot_be_interleaved_is_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


def two_models(nodes, *facts, **more):
    return FusionProblem(nodes, (even(nodes, *facts), even(nodes, *facts, model="c", **more)))


@examples(60)
@given(st.integers(1, 8), st.integers(0, 10), *[st.integers(1, 9)] * 4)
def test_puzzle_equation_1_for_unequal_models(nodes, more, f0, b0, first, second):
    """Exact when the times of one model are a multiple of the other's and there are micro-batches for every stage."""
    microbatches = nodes + more
    pair = tuple(even(nodes, microbatches, k * f0, k * b0, model=name) for name, k in (("a", first), ("c", second)))
    work = first * (f0 + b0), second * (f0 + b0)
    equation = microbatches * sum(work) + (nodes - 1) * max(work)
    assert makespan(time_sharing(FusionProblem(nodes, pair))) == equation


@examples(60)
@given(st.integers(1, 8), st.integers(1, 10), st.integers(1, 10), *[st.integers(1, 9)] * 4)
def test_time_sharing_needs_no_more_memory(nodes, m0, m1, f0, f1, b0, b1):
    """Any times: P - s micro-batches of both models on stage s, as 1F1B of one model has."""
    problem = FusionProblem(nodes, (even(nodes, m0, f0, b0), even(nodes, m1, f1, b1, model="c")))
    time, peaks = check(problem, time_sharing(problem).orders)
    assert peaks == [min(nodes - s, m0 + m1) for s in range(nodes)]
    assert time <= serial_makespan(problem)


def test_time_sharing_needs_one_layout():
    opposed = two_models(4, 4, reverse=True)
    with pytest.raises(InputError, match="pipelines a and c share node 3 but run over"):
        time_sharing(opposed)
    assert makespan(time_sharing(same_layout_problem(opposed))) == 22
    with pytest.raises(InputError, match="visits node 0 2 times"):
        time_sharing(FusionProblem(1, (replace(even(2, 2), placement=(0, 0)),)))


def costs(layout, forward):
    """Stage s takes forward + s: a merged stage must add the right ones."""
    times = tuple(forward + s for s in range(layout.pp))
    return StageCosts(times, tuple(2 * t for t in times), tuple(1 + s / 8 for s in range(layout.pp)))


def priced(actor, critic):
    """The layouts and what their stages cost."""
    layouts = {"actor": ParallelLayout.parse(actor), "critic": ParallelLayout.parse(critic)}
    return layouts, {model: costs(layout, first) for (model, layout), first in zip(layouts.items(), (1, 2))}


# actor, critic, M1 -> nodes, K1, K2, M2, merged stages, replicas
LAYOUTS = [
    ("d2t1p6", "d3t1p4", 6, 12, 2, 3, 4, (6, 4), 1),  # coprime groups: 2 x 6 stages with 3 x 4 on 12 nodes
    ("d4t1p6", "d6t1p4", 3, 12, 2, 3, 2, (6, 4), 2),  # the same on two replicas
    ("d1t1p8", "d1t2p4", 4, 4, 1, 1, 4, (4, 4), 1),  # tp1 < tp2: the actor's stages are merged by two
    ("d1t4p2", "d1t1p8", 4, 2, 1, 1, 4, (2, 2), 1),  # tp1 > tp2: the critic's by four
    ("d2t2p4", "d2t4p2", 6, 2, 1, 1, 6, (2, 2), 2),  # pp1/s = 2 of the actor's four stages
    ("d2t1p6", "d3t2p2", 6, 6, 2, 3, 4, (3, 2), 1),  # merged and coprime at once
]


@pytest.mark.parametrize("actor, critic, m1, nodes, k1, k2, m2, stages, replicas", LAYOUTS)
def test_layouts_become_problems(actor, critic, m1, nodes, k1, k2, m2, stages, replicas):
    layouts, prices = priced(actor, critic)
    problem = fused_problem(layouts, m1, prices)
    assert problem.nodes == nodes and gcd(k1, k2) == 1 and k1 * m1 == k2 * m2
    for model, k, m, depth in (("actor", k1, m1, stages[0]), ("critic", k2, m2, stages[1])):
        mine = [p for p in problem.pipelines if p.model == model]
        assert [(p.microbatches, p.stages) for p in mine] == [(m, depth)] * k
        assert sorted(node for p in mine for node in p.placement) == list(range(nodes))
    for pipeline, layout, first in zip((problem.pipelines[0], problem.pipelines[-1]), layouts.values(), (1, 2)):
        merge = layout.pp // pipeline.stages
        assert pipeline.forward[0] == sum(first + s for s in range(merge))
        assert sum(pipeline.forward) == sum(costs(layout, first).forward)
        assert pipeline.activation[0] == 1 + (merge - 1) / 8  # the fullest sub-stage
    assert len(rank_map(layouts).replicas) == replicas
    for build in (serial_1f1b, greedy, capped_greedy):
        assert makespan(build(problem)) >= latency_bound(problem)
    assert FusionProblem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem


@pytest.mark.parametrize(
    "actor, critic, m1, message",
    [
        ("d2t1p6", "d3t1p4", 5, r"K1\*M1 = 2\*5 = 10 micro-batches do not divide over K2 = 3"),
        ("d1t1p2", "d1t1p2", 0, "actor_microbatches is 0"),
    ],
)
def test_unequal_microbatches_are_refused_with_their_arithmetic(actor, critic, m1, message):
    layouts, prices = priced(actor, critic)
    with pytest.raises(InputError, match=message):
        fused_problem(layouts, m1, prices)
