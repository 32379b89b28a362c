"""Folding a problem and unfolding its schedules: what is merged, and that what comes out is valid."""

import itertools
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import (
    capped_greedy,
    capped_halfway,
    changed_facts,
    random_problem,
)
from testkit.solutions import check_found, solution_in

from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.folding import EARLY, SKEWS, Unfolder, folded_problem


def drawn(seed, largest=4):
    """A random problem that leaves no node idle."""
    problems = (random_problem(seed + k, largest) for k in itertools.count())
    return next(p for p in problems if len({node for q in p.pipelines for node in q.placement}) == p.nodes)


def doubled(problem, seed):
    """A problem that folds to the nodes and pipelines of `problem`: every stage in two parts of unlike times."""
    rng = random.Random(seed)
    flipped = [rng.randint(0, 1) for _ in range(problem.nodes)]

    def parts(values):
        return tuple(value * share for value in values for share in rng.choice(((0.5, 0.5), (0.25, 0.75), (1, 1))))

    def pipeline(p):
        placement = tuple(2 * node + (half ^ flipped[node]) for node in p.placement for half in (0, 1))
        count = 2 * p.microbatches - rng.randint(0, 1)
        return replace(p, placement=placement, microbatches=count, **changed_facts(p, parts))

    return replace(problem, nodes=2 * problem.nodes, pipelines=tuple(map(pipeline, problem.pipelines)))


def unfolder_of(small, large):
    graph = build_graph(large)
    return Unfolder(build_graph(small), Dispatcher(graph)), graph


@examples(60)
@given(st.integers(0, 10**6), st.sampled_from((greedy, capped_greedy, serial_1f1b)), st.booleans())
def test_what_comes_out_is_valid_and_costs_what_it_says(seed, builder, capped):
    problem = doubled(drawn(seed), seed)
    problem = capped_halfway(problem) if capped else problem
    folded = folded_problem(problem)
    if folded is None:
        assert capped
        return
    asked = []
    unfolder, graph = unfolder_of(folded, problem)
    start = solution_in(builder(folded))
    lifted, fastest = unfolder.extend(start, lambda solution: asked.append(solution) or len(asked) % 2 == 0)
    assert len(asked) == len(SKEWS) * len(EARLY)
    for solution in asked:
        check_found(graph, solution)
    assert lifted[:2] == min(solution[:2] for solution in asked[1::2])
    assert fastest[:2] == min(solution[:2] for solution in asked)
    again, _ = unfolder_of(folded, problem)[0].extend(start, lambda solution: True)
    once_more, _ = unfolder.extend(start, lambda solution: True)
    assert (again is None) == (once_more is None)
    assert again is None or again.sequence.tolist() == once_more.sequence.tolist()
