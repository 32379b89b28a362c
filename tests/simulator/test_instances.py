"""The event simulation of an instance: closed forms, pauses, and how its work grows (test_step_by_step.py: exact)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.sim_helpers import equal, lengths_strategy, limits, linear_cost, long_tail, simulate_generation, tight

from rlhfuse.base.errors import InputError
from rlhfuse.simulator.instances import InstanceRun, SimulatedSequence, split_samples
from rlhfuse.simulator.lengths import SampleLengths


def test_equal_lengths_have_a_closed_form():
    """8 samples of 10 + 50 tokens: one prefill, then 49 steps of 10 + 8 ms and 1 us per context token."""
    context = sum(8 * (10 + done) for done in range(1, 50))
    expected = 2e-3 + 80 * 1e-4 + 49 * 18e-3 + context * 1e-6
    assert simulate_generation(equal(8, 10, 50), 1, linear_cost(), limits()) == pytest.approx((expected,) * 8)


@examples(40)
@given(lengths_strategy(), st.floats(0.0, 3.0), st.integers(140, 700))
def test_a_pause_stops_at_the_first_boundary_and_changes_nothing(lengths, until, capacity):
    rows = list(enumerate(zip(lengths.prompt, lengths.output)))
    whole, paused = (
        InstanceRun([SimulatedSequence(i, *row) for i, row in rows], linear_cost(), tight(capacity)) for _ in range(2)
    )
    whole.run()
    paused.run(until)
    assert paused.clock >= until or not paused.unfinished
    paused.run()
    assert [i for _, i in paused.finished] == [i for _, i in whole.finished]
    assert paused.clock == pytest.approx(whole.clock, rel=1e-9)


def test_a_pause_overshoots_by_less_than_a_step():
    run = InstanceRun([SimulatedSequence(0, 10, 100)], linear_cost(), limits())
    run.run(0.5)
    assert 0.5 <= run.clock < 0.5 + 0.012
    clock, tokens = 3e-3, 11
    while clock < 0.5:
        clock, tokens = clock + 11e-3 + tokens * 1e-6, tokens + 1
    assert run.clock == pytest.approx(clock)
    assert run.tokens_of(run.unfinished[0]) == tokens


def test_samples_are_split_contiguously_and_evenly():
    assert split_samples(10, 4) == (range(0, 2), range(2, 5), range(5, 7), range(7, 10))


def test_too_long_or_too_little_room_is_refused():
    with pytest.raises(InputError, match="exceed the run's 100 \\+ 200"):
        simulate_generation(SampleLengths((10,), (201,)), 1, linear_cost(), limits())
    with pytest.raises(InputError, match="KV of 299 tokens, fewer than one sample of 100 \\+ 200 = 300"):
        limits(kv_capacity_bytes=29900.0)


class Counting:
    """Costs, and how often the price of decode steps was asked."""

    def __init__(self, costs):
        self.costs, self.asked = costs, 0

    def decode_step_seconds(self, *arguments):
        self.asked += 1
        return self.costs.decode_step_seconds(*arguments)

    def __getattr__(self, name):
        return getattr(self.costs, name)


def test_work_grows_with_samples_not_with_tokens():
    """512 samples on 32 instances: steps between two changes of a batch are priced at once."""
    for longest in (200, 20_000):
        costs, room = Counting(linear_cost()), dict(kv_capacity_bytes=1e9, max_output_tokens=longest)
        simulate_generation(long_tail(512, longest=longest), 32, costs, limits(**room))
        assert 0 < costs.asked <= 2 * 512
