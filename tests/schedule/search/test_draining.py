"""The banker's test against all orders in which what is in flight could drain."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.schedule_cases import random_problem

from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.schedule.search.draining import can_drain, claim, new_drain, stages_of


class State:
    """Operations begun of every lane, and what that holds; operations begin in any order that data and caps allow."""

    def __init__(self, problem):
        self.graph = build_graph(problem)
        self.pipelines = len(problem.pipelines)
        self.caps = [loosen(problem.node_cap(node)) for node in range(problem.nodes)]
        self.drains = cache(self._drains)  # by State.done

    def level(self, done):
        level = np.zeros(len(self.caps))
        for lane, count in zip(self.graph.lanes, done):
            level[lane.node] += count * self.graph.memory[lane.first]
        return level

    def next_ones(self, done):
        """(lane, operation) that may begin."""
        graph, level = self.graph, self.level(done)
        for number, lane in enumerate(graph.lanes):
            o = lane.first + done[number]
            if done[number] == lane.microbatches:
                continue
            source = graph.upstream[o]
            if source >= 0 and done[graph.lane[source]] <= source - graph.lanes[graph.lane[source]].first:
                continue
            if level[lane.node] + graph.memory[o] <= self.caps[lane.node]:
                yield number, o

    def after(self, done, number):
        return (*done[:number], done[number] + 1, *done[number + 1 :])

    def _drains(self, done):
        """Whether some order ends all that is begun without a new micro-batch: the definition, by trying all."""
        if len({(lane.pipeline, count) for lane, count in zip(self.graph.lanes, done)}) == self.pipelines:
            return True
        begun = (number for number, o in self.next_ones(done) if self.graph.upstream[o] >= 0)
        return any(self.drains(self.after(done, number)) for number in begun)


def walk(seed):
    """A random walk through states that drain: of each operation that has room, (the test's answer, the truth)."""
    rng = random.Random(seed)
    problem = random_problem(seed, 3)
    problem = replace(
        problem,
        pipelines=tuple(replace(p, microbatches=min(p.microbatches, 3)) for p in problem.pipelines[:2]),
        memory_cap=tuple(least * rng.choice((1, 1.3, 1.7, 2.2)) for least in min_memory(problem)),
    )
    state = State(problem)
    stages, drain, caps = stages_of(state.graph), new_drain(state.graph), np.array(state.caps)
    done = (0,) * len(state.graph.lanes)
    for _ in range(state.graph.size):
        allowed = []
        for number, o in state.next_ones(done):
            lane, after = state.graph.lanes[number], state.after(done, number)
            drain.claimed[:] = 0.0
            counts = zip(state.graph.lanes, after)
            for stage, count in [(stages.first[x.pipeline] + x.stage, c) for x, c in counts if x.kind.name == "F"]:
                for _ in range(count):
                    claim(stages, stage, drain)
            microbatch = done[number]
            answer = can_drain(stages, np.array(after), state.level(after), caps, lane.pipeline, microbatch, drain)
            yield bool(stages.grows), answer, state.drains(after)
            if answer:
                allowed.append(after)
        if not allowed:
            break
        done = rng.choice(allowed)
    assert sum(done) == state.graph.size, "a dead end"


@examples(150)
@given(st.integers(0, 10**6))
def test_it_is_exact_unless_a_backward_takes_memory_and_then_refuses_too_much(seed):
    for grows, answer, truth in walk(seed):
        assert answer == truth if not grows else truth or not answer


def test_the_walks_meet_both_answers():
    answers = [entry for seed in range(200) for entry in walk(seed)]
    for grows in (False, True):
        assert {answer for kind, answer, _ in answers if kind == grows} == {True, False}
