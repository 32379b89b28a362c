"""The event simulation of an instance: a closed form, and how its work grows (test_step_by_step.py: exact)."""

import pytest
from testkit.sim_helpers import equal, limits, linear_cost, long_tail, simulate_generation

from rlhfuse.base.errors import InputError
from rlhfuse.simulator.lengths import SampleLengths


def test_equal_lengths_have_a_closed_form():
    """8 samples of 10 + 50 tokens: one prefill, then 49 steps of 10 + 8 ms and 1 us per context token."""
    context = sum(8 * (10 + done) for done in range(1, 50))
    expected = 2e-3 + 80 * 1e-4 + 49 * 18e-3 + context * 1e-6
    assert simulate_generation(equal(8, 10, 50), 1, linear_cost(), limits()) == pytest.approx((expected,) * 8)


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
