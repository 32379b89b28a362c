"""Token rewards, GAE and whitening against plain loops and closed forms."""

import math

import pytest
import torch

from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.ppo.advantage import BLOCK, add_advantages, generalized_advantages, whiten
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards, kl_estimate


def gae_loop(rewards, values, gamma, lam):
    """The recursion of one sample, in Python's float64."""
    advantages, carried, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        carried = delta + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages


def check_against_loop(lengths, gamma, lam, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rewards = torch.randn(total, generator=generator, dtype=torch.float64)
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    got = generalized_advantages(rewards, values, torch.tensor(lengths), gamma, lam)
    expected = []
    for r, v in zip(rewards.split(lengths), values.split(lengths)):
        expected += gae_loop(r.tolist(), v.tolist(), gamma, lam)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [[BLOCK], [BLOCK + 1], [BLOCK - 1, 1], [3 * BLOCK + 7, 2, 2 * BLOCK, 1]])
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.99, 0.0), (0.0, 0.5)])
def test_gae_carries_over_blocks(lengths, gamma, lam):
    check_against_loop(lengths, gamma, lam)


def make_batch():
    ref = [torch.tensor([-1.5, -1.0]), torch.tensor([-40.0, -0.5, -2.0])]
    old = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -0.5, -1.0])]
    rollouts = [
        Rollout(i, (1,), (2,) * len(o), o, reason, r, torch.zeros(len(o)), score)
        for i, (o, r, reason, score) in enumerate(zip(old, ref, ["stop", "length"], [3.0, -9.0]))
    ]
    return RolloutBatch.from_rollouts(rollouts)


@pytest.mark.parametrize(
    "estimator, x, expected",
    [
        ("k1", 0.5, 0.5),
        ("k1", -30.0, -20.0),
        ("k2", 0.5, 0.125),
        ("k2", 30.0, 200.0),
        ("k3", 0.5, math.exp(-0.5) - 1 + 0.5),
        ("k3", -1.0, math.e - 2),
        ("k3", -5.0, 10.0),  # capped
        ("k3", 30.0, 10.0),
        ("k3", 0.0, 0.0),
        ("k1", -1e300, -20.0),
        ("k2", 1e300, 200.0),
        ("k3", -1e300, 10.0),
    ],
)
def test_kl_estimators(estimator, x, expected):
    got = kl_estimate(torch.tensor([x], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), estimator)
    assert got.item() == pytest.approx(expected, rel=1e-12)


def test_k1_and_k3_estimate_the_kl_divergence():
    """Both averages over samples of p come near the exact KL(p || q)."""
    generator = torch.Generator().manual_seed(0)
    p, q = (0.5 * torch.randn(2, 50, generator=generator, dtype=torch.float64)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        assert (p.exp() * kl_estimate(p, q, estimator)).sum() == pytest.approx(exact.item(), rel=1e-9)


def test_advantages_are_whitened_and_returns_are_not():
    batch = add_token_rewards(make_batch(), AlgorithmConfig(), 8)
    plain = add_advantages(batch, AlgorithmConfig(whiten_advantages=False))
    white = add_advantages(batch, AlgorithmConfig(whiten_advantages=True))
    assert torch.equal(plain.returns, white.returns)
    torch.testing.assert_close(plain.returns, plain.advantages + batch.values)
    torch.testing.assert_close(white.advantages, whiten(plain.advantages), rtol=1e-5, atol=1e-6)
    assert white.advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.advantages.square().mean().item() == pytest.approx(1, rel=1e-5)
    assert white.advantages.dtype == white.returns.dtype == torch.float32


def test_advantages_do_not_depend_on_other_samples_before_whitening():
    batch = add_token_rewards(make_batch(), AlgorithmConfig(), 8)
    algorithm = AlgorithmConfig(whiten_advantages=False)
    whole = add_advantages(batch, algorithm)
    alone = add_advantages(batch.select([1]), algorithm)
    assert torch.equal(whole.select([1]).advantages, alone.advantages)
