"""Losses, their gradients and statistics against per-token loops, and far beyond their clamps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.losses import add_stats, kl_loss, loss_metrics, policy_loss, value_loss

FAR = math.exp(20)  # where log-ratios are clamped


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def rows(seed):
    return torch.randn(3, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clipped_loss(logprobs, old_logprobs, advantages, low, high=0.0, dual=0.0):
    """The default policy loss, of one sample."""
    algorithm = AlgorithmConfig(clip_eps=low, clip_eps_high=high, dual_clip=dual)
    return policy_loss(logprobs, old_logprobs, advantages, torch.tensor([len(logprobs)]), algorithm)


def in_parts(loss_of, leaf, others, *settings):
    """(loss, statistics) of a mini-batch that is cut in three; its gradient is in `leaf`."""
    total, stats = 0.0, {}
    for part in (slice(0, 4), slice(4, 19), slice(19, 30)):
        losses, more = loss_of(leaf[part], *(other[part] for other in others), *settings)
        loss = losses.sum()
        loss.backward()
        assert not any(value.requires_grad for value in more.values())
        total, stats = total + loss.item(), add_stats(stats, more)
    return total, stats


@examples(50)
@given(
    seed=st.integers(0, 1000),
    low=st.floats(0.01, 0.9),
    high=st.just(0.0) | st.floats(0.01, 2),
    dual=st.sampled_from([0.0, 1.5, 3.0]),
)
def test_policy_loss_and_its_gradient_equal_the_loop(seed, low, high, dual):
    new, old, advantages = 3 * rows(seed)
    leaf = new.clone().requires_grad_()
    loss, stats = in_parts(clipped_loss, leaf, (old, advantages), low, high, dual)
    expected, clips, bounded, slopes = 0.0, 0, 0, []
    for n, o, a in zip(new.tolist(), old.tolist(), advantages.tolist()):
        ratio = math.exp(n - o)
        plain, clipped = -a * ratio, -a * min(max(ratio, 1 - low), 1 + (high or low))
        worse, stopped = max(plain, clipped), clipped > plain
        clips += stopped
        if dual and a < 0 and worse > -a * dual:
            worse, bounded, stopped = -a * dual, bounded + 1, True
        expected += worse
        slopes.append(0.0 if stopped else plain)
    assert loss == pytest.approx(expected, rel=1e-10) and leaf.grad.tolist() == pytest.approx(slopes, rel=1e-9)
    assert (stats["pg_clipfrac"], stats.get("pg_clipfrac_lower", 0)) == (clips, bounded)
    assert stats["ppo_kl"].item() == pytest.approx((old - new).sum().item())
    assert stats["logprob_abs_diff"].item() == pytest.approx((old - new).abs().sum().item())


@examples(25)
@given(seed=st.integers(0, 1000), eps=st.just(0.0) | st.floats(0.01, 2))
def test_value_loss_and_its_gradient_equal_the_loop(seed, eps):
    values, old, returns = rows(seed)
    leaf = values.clone().requires_grad_()
    loss, stats = in_parts(value_loss, leaf, (old, returns), eps)
    expected, clips, slopes = 0.0, 0, []
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist()):
        plain, clipped = (v - r) ** 2, ((min(max(v, o - eps), o + eps) if eps else v) - r) ** 2
        expected, clips = expected + 0.5 * max(plain, clipped), clips + (clipped > plain)
        slopes.append(0.0 if clipped > plain else v - r)
    assert loss == pytest.approx(expected, rel=1e-10) and leaf.grad.tolist() == pytest.approx(slopes, rel=1e-9)
    assert stats["vf_clipfrac"].item() == clips
    metrics, residual = loss_metrics("critic", stats, 30), returns - values
    explained = 1 - (residual.var(correction=0) / returns.var(correction=0)).item()
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained)
    assert metrics["critic/vpred_mean"] == pytest.approx(values.mean().item())


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
    got, stats = clipped_loss(new, wide(0.0), wide(advantage), 0.2, dual=dual)
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-12) and new.grad.item() == 0.0
    assert stats["ppo_kl"].item() == pytest.approx(-20.0 * (1 if x > 0 else -1))


@pytest.mark.parametrize(
    "estimator, value, slope",
    [
        ("k1", lambda x: x, lambda x: 1.0),
        ("k2", lambda x: x * x / 2, lambda x: x),
        ("k3", lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x)),
        ("abs", abs, lambda x: (x > 0) - (x < 0)),
        ("k1+", lambda x: x, lambda x: x),
        ("k3+", lambda x: math.exp(-x) - 1 + x, lambda x: x),
        ("abs+", abs, lambda x: x),
    ],
)
def test_kl_loss_and_its_gradient(estimator, value, slope):
    ratios = [-0.5, 0.0, 2.0]
    new = wide(*ratios).requires_grad_()
    losses, stats = kl_loss(new, wide(0.0, 0.0, 0.0), estimator)
    losses.sum().backward()
    assert losses.sum().item() == pytest.approx(sum(map(value, ratios)), rel=1e-12) == stats["kl_loss"].item()
    assert new.grad.tolist() == pytest.approx([slope(x) for x in ratios])


@pytest.mark.parametrize("estimator, bound", [("k1", 20.0), ("k2", 200.0), ("k3", 10.0), ("abs", 20.0)])
def test_kl_loss_of_an_absurd_ratio_is_bounded_and_has_no_gradient(estimator, bound):
    """But with + the gradient of k2 of the ratio as it is."""
    for ratio in (500.0, 1e300, -500.0, -1e300):
        new = wide(ratio).requires_grad_()
        for plus, slope in (("", 0.0), ("+", ratio)) if estimator != "k2" else (("", 0.0),):
            new.grad = None
            loss, _ = kl_loss(new, wide(0.0), estimator + plus)
            loss.sum().backward()
            assert loss.item() == (-bound if estimator == "k1" and ratio < 0 else bound) and new.grad.item() == slope


def test_no_token_at_all():
    """A rank may hold a micro-batch whose tokens are none: sums of nothing are 0 and carry a gradient of nothing."""
    empty = torch.zeros(0, requires_grad=True)
    for losses, stats in (
        clipped_loss(empty, empty.detach(), empty.detach(), 0.2, 0.3, 3.0),
        value_loss(empty, empty.detach(), empty.detach(), 0.2),
        kl_loss(empty, empty.detach(), "k3"),
    ):
        losses.sum().backward()
        assert len(losses) == 0 and all(value.item() == 0.0 for value in stats.values())


def test_metrics_of_one_token():
    _, stats = clipped_loss(wide(-1.0), wide(-2.0), wide(3.0), 0.2)
    metrics = loss_metrics("actor", stats, 1)
    assert metrics["actor/pg_loss"] == pytest.approx(-3.0 * 1.2) and metrics["actor/ppo_kl"] == -1.0
    assert metrics["actor/pg_clipfrac"] == 1.0
    _, stats = value_loss(wide(1.0), wide(1.0), wide(3.0), 0.0)
    assert loss_metrics("critic", stats, 1) == {
        "critic/vf_loss": 2.0,
        "critic/vf_clipfrac": 0.0,
        "critic/vpred_mean": 1.0,
        "critic/vf_explained_var": 0.0,
    }
