"""Any order of add, step, abort, preempt, move, pause, resume and load keeps blocks, tables and queues in agreement.

Hypothesis searches the orders and shrinks one that fails to a few lines. `EnginePair` checks the integrity of an engine
after everything it does to it, and every finished sample against the sample alone.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from testkit.engine_pair import SPEC, EnginePair, Workload, draw_requests, move

from rlhfuse.gen.engine import SamplingParams

ENGINE = st.integers(0, 1)


class TwoEngines(RuleBasedStateMachine):
    workload = Workload(draw_requests(24, seed=5, longest_stem=20, most_tokens=8))

    @initialize(
        block_tokens=st.integers(1, 6),
        spare=st.tuples(*[st.integers(0, 12)] * 2),
        sequences=st.tuples(*[st.integers(1, 8)] * 2),
        budgets=st.tuples(*[st.integers(1, 40)] * 2),
    )
    def begin(self, block_tokens, spare, sequences, budgets):
        fewest = self.workload.fewest_blocks(list(self.workload.requests), block_tokens)
        options = [
            dict(block_tokens=block_tokens, num_blocks=fewest + s, max_sequences=n, max_batched_tokens=b)
            for s, n, b in zip(spare, sequences, budgets)
        ]
        self.pair = EnginePair(self.workload, options)
        self.coming = list(self.workload.requests)

    def any_unfinished(self) -> bool:
        return any(engine.has_unfinished() for engine in self.pair.engines)

    @rule(which=ENGINE, count=st.integers(1, 4))
    def add(self, which, count):
        for _ in range(min(count, len(self.coming))):
            self.pair.add(which, self.coming.pop())

    @rule(which=ENGINE, count=st.integers(1, 5))
    def step(self, which, count):
        for _ in range(count):
            self.pair.step(which)

    @precondition(any_unfinished)
    @rule(which=ENGINE, data=st.data())
    def abort(self, which, data):
        if here := self.pair.unfinished(which):
            self.pair.abort(which, data.draw(st.sampled_from(here)))

    @precondition(any_unfinished)
    @rule(which=ENGINE, with_kv=st.booleans(), as_bytes=st.booleans(), data=st.data())
    def move(self, which, with_kv, as_bytes, data):
        if here := self.pair.unfinished(which):
            self.pair.move(which, data.draw(st.lists(st.sampled_from(here), unique=True)), with_kv, as_bytes)

    @rule(which=ENGINE)
    def preempt(self, which):
        self.pair.preempt(which)

    @rule(which=ENGINE)
    def reload(self, which):
        self.pair.reload(which)

    @rule(which=ENGINE)
    def pause(self, which):
        self.pair.pause(which)

    @rule(which=ENGINE)
    def resume(self, which):
        self.pair.resume(which)

    def teardown(self):
        if hasattr(self, "pair"):
            self.pair.drain()
            entered = set(self.workload.requests) - set(self.coming)
            assert self.pair.finished | self.pair.aborted == entered


@pytest.mark.timeout(1200)  # a failure takes minutes to shrink
def test_any_order_keeps_integrity():
    plan = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=30)
    run_state_machine_as_test(TwoEngines, settings=plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_order_keeps_integrity_searched_longer():
    plan = settings(derandomize=True, deadline=None, max_examples=2000, stateful_step_count=60)
    run_state_machine_as_test(TwoEngines, settings=plan)


def serve(count: int, seed: int) -> None:
    """`count` short samples pass through one small engine, some aborted, moved or interrupted; no block is lost."""
    workload, rng = Workload([]), random.Random(seed)
    engine = workload.engine(num_blocks=60, block_tokens=4, max_sequences=64, max_batched_tokens=128)
    other = workload.engine(num_blocks=60, block_tokens=4, max_sequences=64, max_batched_tokens=128)
    params = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2, 3, 5)]
    stems = [[rng.randrange(SPEC.vocab) for _ in range(8)] for _ in range(6)]
    entered = finished = aborted = steps = 0
    while entered < count or engine.has_unfinished():
        while entered < count and len(engine.unfinished()) < 80:
            prompt = rng.choice(stems)[: rng.randint(0, 8)] + [rng.randrange(SPEC.vocab)]
            engine.add(entered, prompt, rng.choice(params))
            entered += 1
        finished += len(engine.step())
        steps += 1
        here = [state.sample_id for state in engine.unfinished()]
        if here and steps % 3 == 0:
            engine.abort(rng.choice(here))
            aborted += 1
        elif steps % 50 == 1:
            move(engine, other, here, with_kv=steps % 100 == 1, as_bytes=False)
            engine, other = other, engine
        elif steps % 50 == 26:
            engine.pause()
            engine.resume()
        engine.check_integrity()
        other.check_integrity()
    assert finished + aborted == count
    assert engine.free_blocks == other.free_blocks == 60


def test_no_block_is_lost_after_five_thousand_samples():
    serve(5_000, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_block_is_lost_after_a_hundred_thousand_samples():
    serve(100_000, seed=1)
