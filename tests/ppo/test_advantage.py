"""Advantages and returns against their definitions, written out in Python's float64."""

import math
import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.rollouts import batch_of

from rlhfuse.base.errors import InputError
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.advantage import (
    BLOCK,
    add_advantages,
    discounted_sums,
    generalized_advantages,
    group_normalised,
    leave_one_out,
    spared_samples,
    whiten,
)
from rlhfuse.ppo.token_rewards import add_token_rewards


def advantage_sums(rewards, values, gamma, lam):
    """A_t = sum over j >= t of (gamma lam)^(j - t) (r_j + gamma V_{j+1} - V_j): the definition, no recursion."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values)]
    return [math.fsum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))]


def whitened(numbers):
    mean, spread = statistics.fmean(numbers), math.sqrt(statistics.pvariance(numbers) + 1e-8)
    return pytest.approx([(number - mean) / spread for number in numbers], rel=1e-6, abs=1e-6)


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 12) | st.sampled_from([BLOCK - 1, BLOCK, 2 * BLOCK + 7]), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]) | st.floats(0, 1),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]) | st.floats(0, 1),
)
@example(lengths=[3 * BLOCK + 7, 2], seed=0, gamma=1.0, lam=0.99)
def test_sums_run_over_each_sample_to_its_end(lengths, seed, gamma, lam):
    """One token or none, several blocks."""
    rewards, values = torch.randn(2, sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, returns = [], []
    for r, v in zip(rewards.split(lengths), values.split(lengths)):
        expected += advantage_sums(r.tolist(), v.tolist(), gamma, lam)
        returns += advantage_sums(r.tolist(), [0.0] * len(r), gamma, 1.0)
    found = generalized_advantages(rewards, values, torch.tensor(lengths), gamma, lam)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert discounted_sums(rewards, torch.tensor(lengths), gamma).tolist() == pytest.approx(returns, rel=1e-9, abs=1e-9)
    assert whiten(rewards).tolist() == (whitened(rewards.tolist()) if len(rewards) else [])


def test_bits_do_not_depend_on_the_batch():
    """A sample alone, and between others of any length, has the same bits in float64."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 5 * BLOCK + 7, 1, 2 * BLOCK, 70 * BLOCK + 1]
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    whole = generalized_advantages(rewards, values, torch.tensor(lengths), 1.0, 0.95).split(lengths)
    for place, (r, v) in enumerate(zip(rewards.split(lengths), values.split(lengths))):
        alone = generalized_advantages(r, v, torch.tensor([len(r)]), 1.0, 0.95)
        assert torch.equal(alone, whole[place])


SCORES = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6)


@examples(40)
@given(groups=st.lists(SCORES, min_size=1, max_size=4), interleaved=st.booleans())
@example(groups=[[0.7] * 4], interleaved=False)
def test_group_advantages_equal_the_textbook(groups, interleaved):
    rows = [(g, score) for g, scores in enumerate(groups) for score in scores]
    if interleaved:
        rows = rows[::2] + rows[1::2]
    number, rewards = torch.tensor([7 * g for g, _ in rows]), torch.tensor([score for _, score in rows])
    normalised, centred = group_normalised(rewards, number), group_normalised(rewards, number, divide=False)
    alone = leave_one_out(rewards, number)
    for place, (g, score) in enumerate(rows):
        scores = groups[g]
        mean, spread = statistics.fmean(scores), statistics.stdev(scores)
        others = (math.fsum(scores) - score) / (len(scores) - 1)
        assert centred[place].item() == pytest.approx(score - mean, abs=1e-9)
        # with (nearly) equal scores the division is by the epsilon alone, which magnifies rounding
        assert normalised[place].item() == pytest.approx((score - mean) / (spread + 1e-6), abs=1e-8)
        assert alone[place].item() == pytest.approx(score - others, abs=1e-9)


def test_equal_scores_with_grpos_defaults_train_on_nothing():
    """In the rewards the KL's noise, divided by its own deviation, would be all that there is."""
    algorithm, number = AlgorithmConfig(name="grpo"), torch.zeros(8, dtype=torch.int64)
    ratios = [[0.01 * math.sin(7 * i + j) for j in range(5)] for i in range(8)]
    batch = add_token_rewards(batch_of([0.0] * 8, ratios), algorithm, 8)
    assert add_advantages(batch, algorithm, number).advantages.abs().max() == 0
    in_reward = algorithm.with_(kl_in="reward")
    batch = add_advantages(add_token_rewards(batch, in_reward, 8), in_reward, number)
    assert batch.advantages.abs().max() > 1  # an explicit place is kept


@examples(100)
@given(
    name=st.sampled_from(["grpo", "rloo"]),
    divides=st.booleans(),
    scores=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=6),
    copies=st.integers(2, 17),
    seed=st.integers(0, 99),
)
@example(name="grpo", divides=True, scores=[0.1], copies=3, seed=0)  # in float64 three times 0.1 is no multiple of 3
def test_equal_scores_have_advantages_of_exactly_zero_and_are_spared(name, divides, scores, copies, seed):
    """The last prompt's samples differ in one score."""
    algorithm = AlgorithmConfig(name=name, kl_coef=0, group_std=divides or name == "rloo", skip_zero_gradients=True)
    given_scores = [score for score in [*scores, 0.5] for _ in range(copies)]
    given_scores[-1] = 0.75
    lengths = torch.randint(1, 5, (len(given_scores),), generator=torch.Generator().manual_seed(seed)).tolist()
    batch = add_token_rewards(batch_of(given_scores, [[0.0] * length for length in lengths]), algorithm, 8)
    batch = add_advantages(batch, algorithm, torch.arange(len(given_scores)) // copies)
    assert spared_samples(batch, algorithm) == frozenset(range(len(scores) * copies))
    for changed in ({"skip_zero_gradients": False}, {"entropy_coef": -0.1}, {"kl_coef": 0.1, "kl_in": "loss"}):
        assert spared_samples(batch, algorithm.with_(**changed)) == frozenset()


def test_a_prompt_with_one_sample_is_refused():
    for function in (group_normalised, leave_one_out):
        with pytest.raises(InputError, match="prompt 5 has one sample"):
            function(torch.ones(3), torch.tensor([4, 5, 4]))


@pytest.mark.parametrize("name, scale", [("grpo", 2 / (math.sqrt(8) + 1e-6)), ("rloo", 4)])
def test_every_token_gets_the_advantage_of_its_samples_rewards(name, scale):
    """A KL in the reward counts: 6 - 0.5 * 2 and 3 - 0.5 * (1 + 3)."""
    algorithm = AlgorithmConfig(name=name, kl_coef=0.5, kl_in="reward")
    batch = add_token_rewards(batch_of([6.0, 3.0], [[2.0, 0.0], [1.0, 3.0, 0.0]]), algorithm, 8)
    batch = add_advantages(batch, algorithm, torch.tensor([3, 3]))
    assert batch.advantages.tolist() == pytest.approx([scale, scale, -scale, -scale, -scale])
    assert batch.returns.tolist() == [5, 5, 1, 1, 1]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_reinforce_takes_what_is_still_to_come(gamma):
    algorithm = AlgorithmConfig(name="reinforce++", kl_coef=0.5, gamma=gamma)
    batch = add_token_rewards(batch_of([4.0], [[1.0, 2.0, 6.0]]), algorithm, 8)  # rewards -0.5, -1, 1
    batch = add_advantages(batch, algorithm)
    returns = [-0.5 - gamma + gamma**2, -1 + gamma, 1.0]
    assert batch.returns.tolist() == returns and batch.advantages.tolist() == whitened(returns)


def test_advantages_of_ppo_are_whitened_and_returns_are_not():
    batch = add_token_rewards(batch_of([3.0, -9.0], [[0.5, -1.0], [39.0, 0.0, 1.0]]), AlgorithmConfig(), 8)
    batch = batch.with_fields(values=torch.arange(5.0))
    plain, white = (
        add_advantages(batch, AlgorithmConfig(whiten_advantages=on, lam=0.9, gamma=0.5)) for on in (False, True)
    )
    expected = []
    for r, v in zip(batch.token_rewards.split([2, 3]), batch.values.split([2, 3])):
        expected += advantage_sums(r.tolist(), v.tolist(), 0.5, 0.9)
    assert plain.advantages.tolist() == pytest.approx(expected) and white.advantages.tolist() == whitened(expected)
    assert torch.equal(plain.returns, white.returns)
    torch.testing.assert_close(plain.returns, plain.advantages + batch.values)
    assert white.advantages.dtype == white.returns.dtype == torch.float32


def test_reinforce_with_a_baseline_whitens_what_is_off_its_prompts_mean():
    """Over tokens: of a sample with two of them it is seen twice."""
    algorithm = AlgorithmConfig(name="reinforce_plus_plus_baseline", kl_coef=0.5)
    batch = add_token_rewards(batch_of([6.0, 3.0, 1.0, 0.0], [[2.0, 0.0], [1.0], [0.0], [0.0]]), algorithm, 8)
    batch = add_advantages(batch, algorithm, torch.tensor([3, 3, 4, 4]))
    assert batch.advantages.tolist() == whitened([1.5, 1.5, -1.5, 0.5, -0.5]) and batch.returns.tolist() == [
        6,
        6,
        3,
        1,
        0,
    ]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "ppo", "reinforce++"])
def test_a_sample_that_does_not_count_is_in_the_baseline_and_not_in_the_whitening(name):
    """Scores of a prompt are compared as ever; mean and deviation over tokens are of those that count."""
    algorithm = AlgorithmConfig(name=name, kl_coef=0)
    batch = batch_of([6.0, 3.0, 1.0, 0.0], [[2.0, 0.0], [1.0], [0.0], [0.0]]).with_fields(values=torch.arange(5.0))
    batch, groups = add_token_rewards(batch, algorithm, 8), torch.tensor([3, 3, 4, 4])
    some = batch.counting(torch.tensor([False, True, True, True]))
    raw = add_advantages(some, algorithm.with_(whiten_advantages="false"), groups).advantages
    assert torch.equal(raw, add_advantages(batch, algorithm.with_(whiten_advantages="false"), groups).advantages)
    found = add_advantages(some, algorithm, groups).advantages
    assert found[2:].tolist() == (whitened(raw[2:].tolist()) if algorithm.whitens else raw[2:].tolist())
    none = batch.counting(torch.tensor([False] * 4))
    assert torch.equal(add_advantages(none, algorithm, groups).advantages, raw)
