"""From scores and log-ratios to the rewards of tokens, against a loop; scores of model and function by weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.rollouts import batch_of

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.settings import RewardConfig
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards, combine_rewards, sample_kl, sample_rewards

KL = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: min(math.exp(-x) - 1 + x, 10.0)}


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    estimator=st.sampled_from(list(KL)),
    kl_coef=st.sampled_from([0.0, 0.1, 2.0]),
    seed=st.integers(0, 99),
    clip=st.sampled_from([0.0, 1.5]),
    missing=st.sampled_from([0.0, 0.5]),
    long=st.sampled_from([0.0, 0.25]),
    late=st.sampled_from([0, 3, 8]),
)
def test_token_rewards_equal_the_loop(lengths, estimator, kl_coef, seed, clip, missing, long, late):
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i, length in enumerate(lengths):
        old, ref = -5 * torch.rand(2, length, generator=generator)
        score = float(4 * torch.randn((), generator=generator))
        ref[0] += 100.0 * (seed % 3 - 1)  # far beyond the clamp on either side
        rollouts.append(Rollout(i, (1,), (2,) * length, old, "length" if length == 8 else "stop", ref, None, score))
    algorithm = AlgorithmConfig(
        kl_estimator=estimator,
        kl_coef=kl_coef,
        score_scale=-0.5,
        score_clip=clip,
        missing_eos_penalty=missing,
        length_penalty=long,
        overlong_penalty=2.0 if late else 0.0,
        overlong_tokens=late,
    )
    batch = add_token_rewards(RolloutBatch.from_rollouts(rollouts), algorithm, 8)
    expected, sums, kls = [], [], []
    for rollout in rollouts:
        pairs = zip(rollout.old_logprobs.tolist(), rollout.ref_logprobs.tolist())
        ratios = [max(-20.0, min(20.0, o - r)) for o, r in pairs]
        score, length = -0.5 * rollout.score, len(ratios)
        score = max(-clip, min(clip, score)) if clip else score
        score -= missing * (length == 8) + long * length / 8
        score -= 2.0 * max(0.0, (length - (8 - late)) / late) if late else 0.0
        rewards = [-kl_coef * KL[estimator](x) for x in ratios]
        rewards[-1] += score
        expected += rewards
        sums.append(math.fsum(rewards))
        kls.append(math.fsum(ratios))
    assert batch.token_rewards.tolist() == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert sample_kl(batch).tolist() == pytest.approx(kls, rel=1e-5, abs=1e-5)
    assert sample_rewards(batch).tolist() == pytest.approx(sums, rel=1e-4, abs=1e-4)


def test_without_reference_or_with_kl_in_the_loss_rewards_are_scores():
    for batch, algorithm in (
        (batch_of([2.0, 1.0]), AlgorithmConfig(kl_coef=0.0)),
        (batch_of([2.0, 1.0], [[1.0], [1.0]]), AlgorithmConfig(kl_in="loss")),
    ):
        assert add_token_rewards(batch, algorithm, 8).token_rewards.tolist() == [2.0, 1.0]


FUNCTION_SCORES = {12: 100.0, 10: -10.0, 11: 0.0}


@pytest.mark.parametrize(
    "model, function, weights, expected",
    [
        ([1.0, 2.0, 3.0], {}, {"model_weight": -0.5}, [-0.5, -1.0, -1.5]),
        ([None] * 3, FUNCTION_SCORES, {"function_weight": -2.0}, [20.0, 0.0, -200.0]),
        ([1.0, 2.0, 3.0], FUNCTION_SCORES, {}, [-9.0, 2.0, 103.0]),
        ([1.0, 2.0, 3.0], FUNCTION_SCORES, {"model_weight": -1.0, "function_weight": 3.0}, [-31.0, -2.0, 297.0]),
    ],
)
def test_scores_are_the_weighted_sum_by_sample(model, function, weights, expected):
    batch = combine_rewards(batch_of(model, first=10), function, RewardConfig(path="m", function="f", **weights))
    assert batch.sample_ids.tolist() == [10, 11, 12]
    assert batch.scores.tolist() == expected and batch.scores.dtype == torch.float32


def test_a_sample_that_the_function_left_out_is_an_error():
    with pytest.raises(KeyError, match="11"):
        combine_rewards(batch_of([None] * 3, first=10), {10: 1.0, 12: 1.0}, RewardConfig(function="f"))
