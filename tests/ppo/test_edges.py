"""Every pure function at its edges, held against sums written out in Python's float64.

One token, nothing, everything masked, gaps inside, lambda 0 and 1, log-ratios far beyond any clamp, and garbage
wherever nothing may be read.
"""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.ppo.advantage import discounted_returns, generalized_advantages, group_normalised, leave_one_out, whiten
from rlhfuse.ppo.losses import actor_metrics, critic_metrics, kl_loss_sum, policy_loss_sum, value_loss_sum
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards, overlong_share, sample_kl, sample_rewards

GARBAGE = (math.nan, math.inf, -math.inf, 1e308)
FAR = 485165195.40979  # exp(20), where log-ratios are clamped


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def advantage_sums(rewards, values, gamma, lam):
    """A_t = sum over j >= t of (gamma lam)^(j - t) (r_j + gamma V_{j+1} - V_j): the definition, no recursion."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values)]
    return [math.fsum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))]


# advantages and returns -----------------------------------------------------------------------------------------


@examples(25)
@given(
    data=st.data(),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]) | st.floats(0, 1),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]) | st.floats(0, 1),
    garbage=st.sampled_from(GARBAGE),
)
def test_gaps_hold_garbage_and_the_sums_run_over_what_is_left(data, gamma, lam, garbage):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    total = sum(lengths)
    number = st.floats(-10, 10, width=32)
    rewards, values = (data.draw(st.lists(number, min_size=total, max_size=total)) for _ in "rv")
    kept = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    expected, returns, at = [0.0] * total, [0.0] * total, 0
    for length in lengths:
        places = [t for t in range(at, at + length) if kept[t]]
        r, v = [rewards[t] for t in places], [values[t] for t in places]
        for t, a, g in zip(places, advantage_sums(r, v, gamma, lam), advantage_sums(r, [0.0] * len(r), gamma, 1.0)):
            expected[t], returns[t] = a, g
        at += length
    mask = torch.tensor(kept)
    spoilt = [torch.where(mask, wide(*numbers), garbage) for numbers in (rewards, values)]
    got = generalized_advantages(*spoilt, torch.tensor(lengths), gamma, lam, mask)
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    sums = discounted_returns(spoilt[0], torch.tensor(lengths), gamma, mask)
    assert sums.tolist() == pytest.approx(returns, rel=1e-9, abs=1e-9)
    white = whiten(torch.where(mask, wide(*rewards), garbage), mask=mask).tolist()
    left = [r for r, k in zip(rewards, kept) if k]
    if left:
        mean, spread = statistics.fmean(left), math.sqrt(statistics.pvariance(left) + 1e-8)
        told = [(r - mean) / spread if k else 0.0 for r, k in zip(rewards, kept)]
        assert white == pytest.approx(told, rel=1e-6, abs=1e-6)
    else:
        assert white == got.tolist() == [0.0] * total


@pytest.mark.parametrize("garbage", GARBAGE)
def test_all_masked_is_nothing(garbage):
    spoilt, none = torch.full((4,), garbage, dtype=torch.float64), torch.zeros(4, dtype=torch.bool)
    for lengths in ([4], [1, 3], [0, 4, 0]):
        number = torch.tensor(lengths)
        assert generalized_advantages(spoilt, spoilt, number, 1.0, 0.95, none).tolist() == [0.0] * 4
        assert discounted_returns(spoilt, number, 1.0, none).tolist() == [0.0] * 4
    assert whiten(spoilt, mask=none).tolist() == [0.0] * 4
    assert whiten(torch.tensor([7.0])).tolist() == [0.0]


def test_groups_of_two_and_of_huge_scores():
    rewards, groups = wide(1e9, -1e9, 4.0, 1.0), torch.tensor([5, 5, 2, 2])
    assert leave_one_out(rewards, groups).tolist() == [2e9, -2e9, 3.0, -3.0]
    half = math.sqrt(0.5)  # of two scores: half their distance over its standard deviation
    assert group_normalised(rewards, groups).tolist() == pytest.approx([half, -half, half, -half], rel=1e-6)
    assert group_normalised(rewards, groups, divide=False).tolist() == [1e9, -1e9, 1.5, -1.5]


# losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, advantage, dual, loss",
    [
        (500.0, 2.0, 0.0, -2.0 * 1.2),
        (-500.0, 2.0, 0.0, -2.0 / FAR),
        (500.0, -2.0, 0.0, 2.0 * FAR),
        (500.0, -2.0, 3.0, 6.0),
        (-500.0, -2.0, 0.0, 2.0 * 0.8),
        (-500.0, -2.0, 3.0, 2.0 * 0.8),
        (math.inf, 1.0, 0.0, -1.2),
        (-math.inf, 1.0, 0.0, -1.0 / FAR),
    ],
)
def test_policy_loss_far_beyond_the_clamp(x, advantage, dual, loss):
    new = wide(x).requires_grad_()
    got, stats = policy_loss_sum(new, wide(0.0), wide(advantage), 0.2, dual_clip=dual)
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-12) and new.grad.item() == 0.0
    assert stats["ppo_kl"].item() == pytest.approx(-20.0 * (1 if x > 0 else -1))


def test_value_loss_far_from_everything():
    values, old, returns = wide(1e6, -1e6, 3.0), wide(0.0, 0.0, 3.0), wide(-1e6, 1.0, 3.0)
    loss, stats = value_loss_sum(values, old, returns, 0.2)
    squares = [(2e6) ** 2, (1e6 + 1) ** 2, 0.0]
    assert loss.item() == 0.5 * math.fsum(squares) and stats["vf_clipfrac"].item() == 0
    near, _ = value_loss_sum(wide(1.0), wide(0.0), wide(1.0), 0.2)  # right, but too far from the old value
    assert near.item() == pytest.approx(0.5 * 0.8**2)


def test_no_token_at_all():
    """A rank may hold a micro-batch whose tokens are none: sums of nothing are 0 and carry a gradient of nothing."""
    empty = torch.zeros(0, requires_grad=True)
    for loss, stats in (
        policy_loss_sum(empty, empty.detach(), empty.detach(), 0.2, 0.3, 3.0),
        value_loss_sum(empty, empty.detach(), empty.detach(), 0.2),
        kl_loss_sum(empty, empty.detach(), "k3"),
    ):
        loss.backward()
        assert loss.item() == 0.0 and all(value.item() == 0.0 for value in stats.values())
    assert discounted_returns(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 1.0).shape == (0,)
    assert whiten(torch.zeros(0)).shape == (0,)


def test_metrics_of_one_token():
    _, stats = policy_loss_sum(wide(-1.0), wide(-2.0), wide(3.0), 0.2)
    metrics = actor_metrics(stats, 1)
    assert metrics["actor/pg_loss"] == pytest.approx(-3.0 * 1.2) and metrics["actor/ppo_kl"] == -1.0
    assert metrics["actor/pg_clipfrac"] == 1.0
    _, stats = value_loss_sum(wide(1.0), wide(1.0), wide(3.0), 0.0)
    assert critic_metrics(stats, 1) == {
        "critic/vf_loss": 2.0,
        "critic/vf_clipfrac": 0.0,
        "critic/vpred_mean": 1.0,
        "critic/vf_explained_var": 0.0,
    }


# token rewards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, limit, late, share",
    [(1, 1, 1, 1.0), (6, 10, 4, 0.0), (7, 10, 4, 0.25), (10, 10, 4, 1.0), (0, 10, 10, 0.0), (5, 10, 10, 0.5)],
)
def test_overlong_share(length, limit, late, share):
    assert overlong_share(torch.tensor([length]), limit, late).tolist() == [share]


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
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
        ref[0] -= 100.0 * (seed % 2)  # an improbable token
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
    expected, kls = [], []
    for rollout in rollouts:
        pairs = zip(rollout.old_logprobs.tolist(), rollout.ref_logprobs.tolist())
        ratios = [max(-20.0, min(20.0, o - r)) for o, r in pairs]
        of = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: min(math.exp(-x) - 1 + x, 10.0)}
        score, length = -0.5 * rollout.score, len(ratios)
        score = max(-clip, min(clip, score)) if clip else score
        score -= missing * (length == 8) + long * length / 8
        score -= 2.0 * max(0.0, (length - (8 - late)) / late) if late else 0.0
        expected += [-kl_coef * of[estimator](x) for x in ratios]
        expected[-1] += score
        kls.append(math.fsum(ratios))
    assert batch.token_rewards.tolist() == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert sample_kl(batch).tolist() == pytest.approx(kls, rel=1e-5, abs=1e-5)
    sums, at = [], 0
    for length in lengths:
        sums.append(math.fsum(expected[at : at + length]))
        at += length
    assert sample_rewards(batch).tolist() == pytest.approx(sums, rel=1e-4, abs=1e-4)
