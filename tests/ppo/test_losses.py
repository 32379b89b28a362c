"""Losses against per-token loops, their gradients where the clip bites, and sums that add up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.ppo.losses import actor_metrics, add_stats, critic_metrics, kl_loss_sum, policy_loss_sum, value_loss_sum


def numbers(seed, count=30):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, generator=generator, dtype=torch.float64)


@examples(50)
@given(
    seed=st.integers(0, 1000),
    low=st.floats(0.01, 0.9),
    high=st.just(0.0) | st.floats(0.01, 2),
    dual=st.sampled_from([0.0, 1.5, 3.0]),
)
def test_policy_loss_equals_the_loop(seed, low, high, dual):
    new, old, advantages = (3 * row for row in numbers(seed))
    loss, stats = policy_loss_sum(new.requires_grad_(), old, advantages, low, high, dual)
    expected, clips, bounded = 0.0, 0, 0
    for n, o, a in zip(new.tolist(), old.tolist(), advantages.tolist()):
        ratio = math.exp(n - o)
        plain, clipped = -a * ratio, -a * min(max(ratio, 1 - low), 1 + (high or low))
        worse, clips = max(plain, clipped), clips + (clipped > plain)
        if dual and a < 0:
            bounded += worse > -a * dual
            worse = min(worse, -a * dual)
        expected += worse
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert (stats["pg_clipfrac"], stats.get("pg_clipfrac_lower", 0)) == (clips, bounded)
    assert stats["ppo_kl"].item() == pytest.approx((old - new).sum().item())
    assert stats["logprob_abs_diff"].item() == pytest.approx((old - new).abs().sum().item())
    assert loss.requires_grad and not any(value.requires_grad for value in stats.values())


@examples(25)
@given(seed=st.integers(0, 1000), eps=st.just(0.0) | st.floats(0.01, 2))
def test_value_loss_equals_the_loop(seed, eps):
    values, old, returns = numbers(seed)
    loss, stats = value_loss_sum(values, old, returns, eps)
    expected, clips = 0.0, 0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist()):
        plain, clipped = (v - r) ** 2, ((min(max(v, o - eps), o + eps) if eps else v) - r) ** 2
        expected, clips = expected + 0.5 * max(plain, clipped), clips + (clipped > plain)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert stats["vf_clipfrac"].item() == clips


def test_gradients_before_any_update():
    """At ratio 1 the policy gradient is -A per token, and the value gradient V - R: nothing is averaged."""
    logprobs, values, targets = (row.clone() for row in numbers(3, 5))
    logprobs.requires_grad_(), values.requires_grad_()
    policy_loss_sum(logprobs, logprobs.detach(), targets, 0.2)[0].backward()
    value_loss_sum(values, values.detach(), targets, 0.2)[0].backward()
    torch.testing.assert_close(logprobs.grad, -targets)
    torch.testing.assert_close(values.grad, values.detach() - targets)


def test_clip_stops_the_gradient_only_when_it_would_go_too_far():
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss, stats = policy_loss_sum(new, old, advantages, 0.2)
    loss.backward()
    assert (new.grad != 0).tolist() == [False, True, True, False]
    assert stats["pg_clipfrac"].item() == 2


def test_sums_of_microbatches_are_the_sum_of_the_minibatch():
    """Cutting a mini-batch changes neither loss, nor gradient, nor statistics."""
    new, old, advantages = numbers(7)
    whole = new.clone().requires_grad_()
    loss, stats = policy_loss_sum(whole, old, advantages, 0.2)
    loss.backward()
    cut, total = new.clone().requires_grad_(), {}
    for part in (slice(0, 4), slice(4, 19), slice(19, 30)):
        part_loss, part_stats = policy_loss_sum(cut[part], old[part], advantages[part], 0.2)
        part_loss.backward()
        total = add_stats(total, part_stats)
    torch.testing.assert_close(cut.grad, whole.grad)
    assert actor_metrics(total, 30) == pytest.approx(actor_metrics(stats, 30))


def test_explained_variance():
    values, _, returns = numbers(5)
    _, stats = value_loss_sum(values, values, returns, 0.2)
    residual = returns - values
    expected = 1 - (residual.var(correction=0) / returns.var(correction=0)).item()
    metrics = critic_metrics(stats, 30)
    assert metrics["critic/vf_explained_var"] == pytest.approx(expected)
    assert metrics["critic/vpred_mean"] == pytest.approx(values.mean().item())
    _, perfect = value_loss_sum(returns, returns, returns, 0.2)
    assert critic_metrics(perfect, 30)["critic/vf_explained_var"] == 1.0


def test_dual_clip_stops_the_gradient_of_an_absurd_ratio():
    new = torch.tensor([5.0, 0.5], dtype=torch.float64, requires_grad=True)
    policy_loss_sum(new, torch.zeros(2), torch.tensor([-1.0, -1.0]), 0.2, 0.2, 3.0)[0].backward()
    assert (new.grad != 0).tolist() == [False, True]


@pytest.mark.parametrize(
    "estimator, value, slope",
    [
        ("k1", lambda x: x, lambda x: 1.0),
        ("k2", lambda x: x * x / 2, lambda x: x),
        ("k3", lambda x: math.exp(-x) - 1 + x, lambda x: 1 - math.exp(-x)),
    ],
)
def test_kl_loss_and_its_gradient(estimator, value, slope):
    ratios = [-0.5, 0.0, 2.0]
    new = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    loss, stats = kl_loss_sum(new, torch.zeros(3, dtype=torch.float64), estimator)
    loss.backward()
    assert loss.item() == pytest.approx(sum(map(value, ratios))) == stats["kl_loss"].item()
    assert new.grad.tolist() == pytest.approx([slope(x) for x in ratios])


def test_kl_loss_of_an_absurd_ratio_is_bounded_and_has_no_gradient():
    new = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss, _ = kl_loss_sum(new, torch.zeros(2), "k3")
    loss.backward()
    assert loss.item() == 20.0 and new.grad.tolist() == [0.0, 0.0]
