"""The simulation that jumps from event to event against the one that takes every step: their time lines are equal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples, share
from testkit.sim_helpers import lengths_strategy, limits, tight
from testkit.step_by_step import both, exact_costs

from rlhfuse.simulator.lengths import SampleLengths


@examples(150)
@given(
    lengths_strategy(20),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(140, 900),
    st.sampled_from([0, 1 << 14, 1 << 18, 1 << 21]),
    st.sampled_from([16, 1024, 8192]),
    st.integers(1, 8),
    st.sampled_from([(1, 0), (2, 0), (4, 0), (2, 1), (4, 2)]),
    st.sampled_from([0, 140]),
    st.sampled_from([1, 3, 6, 8]),
)
def test_jumping_equals_stepping(
    lengths, instances, threshold, capacity, swap_in, per_token, bs_max, models, padded, most
):
    models, early = models
    sizes = dict(scoring_models=models, early_models=early, max_sequences=most, padded_score_tokens=padded)
    lim = tight(capacity, bs_max=bs_max, **sizes)
    both(lengths, instances, exact_costs(swap_in, per_token), lim, threshold)


def test_jumping_equals_stepping_on_larger_cases():
    """Drawn evenly, so that samples are preempted and several instances hand over to several."""
    draw = np.random.default_rng(0)
    several = early = 0
    for _ in range(share(100)):
        samples, instances = int(draw.integers(4, 25)), int(draw.integers(2, 6))
        prompt, output = (tuple(draw.integers(1, most + 1, samples).tolist()) for most in (60, 80))
        lim = tight(
            int(draw.integers(140, 900)),
            bs_max=int(draw.integers(1, 9)),
            scoring_models=2,
            early_models=int(draw.integers(2)),
            max_sequences=6,
        )
        costs = exact_costs(1 << int(draw.integers(14, 20)), 1024, release=0)
        line = both(SampleLengths(prompt, output), instances, costs, lim, int(draw.integers(1, samples + 1)))
        several += line.plan is not None and len(line.plan.destinations) > 1 and len(line.plan.freed) > 1
        early += line.plan is not None and lim.early_models and line.migrated_bytes > 0
    assert several >= share(10) and early >= share(10)


@examples(150)
@given(
    lengths_strategy(20),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sampled_from([1 << 10, 1 << 16, 1 << 18, 1 << 20]),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_the_reward_function_is_a_queue_of_each_instance(lengths, instances, threshold, seconds, workers, at_once):
    lim = limits(max_prompt_tokens=60, max_output_tokens=80, bs_max=4, max_sequences=6, reward_workers=workers)
    both(lengths, instances, exact_costs(1 << 14, 1024, seconds, at_once), lim, threshold)
