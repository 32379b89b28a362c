"""The simulation that jumps from event to event against one that takes every step, written differently."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples, share
from testkit.sim_helpers import lengths_strategy, limits, simulate_generation, tight
from testkit.step_by_step import StepByStep

from rlhfuse.costs.cost_model import RewardCost
from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.simulator.iteration import simulate_gen_infer
from rlhfuse.simulator.lengths import SampleLengths

TICK = 2.0**-20  # all costs are whole multiples of it, so every sum of them is exact


def exact_costs(swap_in: int, per_token: int, reward: int = 0, at_once: int = 1) -> MeasuredCost:
    return MeasuredCost(
        decode=Line(10000 * TICK, (1000 * TICK, 2 * TICK)),
        prefill=Line(2048 * TICK, (128 * TICK, 0.0)),
        score=Line(4096 * TICK, (per_token * TICK, 64 * TICK)),
        migration=Line(1024 * TICK, (TICK,)),
        swap_in=swap_in * TICK,
        meeting=3072 * TICK,
        release=swap_in // 2 * TICK,
        reward=RewardCost(reward * TICK, at_once) if reward else None,
    )


def both(lengths, instances, costs, lim, threshold):
    """The time line and what takes every step; they must agree."""
    threshold = min(threshold, len(lengths))
    line = simulate_gen_infer(lengths, instances, costs, lim, threshold)
    slow = StepByStep(lengths, instances, costs, lim, threshold).run()
    assert line.plan == slow.plan
    assert line.generation_seconds == max(slow.ended.values())
    assert line.total_seconds == slow.total
    assert sum(count for _, count in slow.scored) == len(lengths)
    if not line.plan:
        ends = simulate_generation(lengths, instances, costs, lim)
        assert dict(enumerate(ends)) == slow.ended
    return line, slow


@examples(150)
@given(
    lengths_strategy(20),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(140, 900),
    st.sampled_from([0, 1 << 14, 1 << 18, 1 << 21]),
    st.sampled_from([16, 1024, 8192]),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 140]),
    st.sampled_from([1, 3, 6, 8]),
)
def test_jumping_equals_stepping(
    lengths, instances, threshold, capacity, swap_in, per_token, bs_max, models, padded, most
):
    lim = tight(capacity, bs_max=bs_max, scoring_models=models, max_sequences=most, padded_score_tokens=padded)
    line, slow = both(lengths, instances, exact_costs(swap_in, per_token), lim, threshold)
    assert line.scored_before_generation_end == sum(
        count for end, count in slow.scored if end <= line.generation_seconds and line.plan
    )


def test_jumping_equals_stepping_on_larger_cases():
    """Drawn evenly, so that several instances hand over to one."""
    draw = np.random.default_rng(0)
    for _ in range(share(100)):
        samples, instances = int(draw.integers(4, 25)), int(draw.integers(2, 6))
        prompt, output = (tuple(draw.integers(1, most + 1, samples).tolist()) for most in (60, 80))
        lim = tight(int(draw.integers(140, 900)), bs_max=int(draw.integers(1, 9)), scoring_models=2, max_sequences=6)
        threshold = int(draw.integers(1, samples + 1))
        both(SampleLengths(prompt, output), instances, exact_costs(1 << 14, 1024), lim, threshold)


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
    line, slow = both(lengths, instances, exact_costs(1 << 14, 1024, seconds, at_once), lim, threshold)
    assert line.reward_seconds == slow.total - max([*slow.ended.values(), *(end for end, _ in slow.scored)])
