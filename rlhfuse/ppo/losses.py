"""The losses and their statistics, as sums over response tokens (Schulman et al. 2017).

The caller divides by the response tokens of the whole mini-batch, over all ranks and micro-batches: then neither
micro-batch size nor layout changes a gradient, and ranks simply add.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhfuse.ppo.token_rewards import LOG_RATIO_LIMIT, kl_estimate

Stats = dict[str, Tensor]  # name -> float64 scalar, a sum over tokens; detached


def policy_loss_sum(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_eps: float,
    clip_eps_high: float = 0.0,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Stats]:
    """sum_t max(-A_t r_t, -A_t clip(r_t, 1-eps, 1+eps_high)), r_t = exp(logprob_t - old_logprob_t); arguments are [R].

    `clip_eps_high` (DAPO's clip-higher) 0: the same as `clip_eps`. `dual_clip` c: where A_t < 0 at most -A_t c (Ye et
    al. 2020); 0: none. Gradient flows into `logprobs`.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_eps, 1 + (clip_eps_high or clip_eps))
    worse = torch.maximum(plain, clipped)
    stats = {"pg_clipfrac": (clipped > plain).sum()}
    if dual_clip:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (worse > bound)
        worse = torch.where(bounded, bound, worse)
        stats["pg_clipfrac_lower"] = bounded.sum()
    loss = worse.sum()
    stats |= {
        "pg_loss": loss,
        "ppo_kl": -log_ratio.double().sum(),  # k1 of KL(old || new): the samples are the old policy's
        "logprob_abs_diff": (logprobs - old_logprobs).abs().double().sum(),
    }
    return loss, _detached(stats)


def kl_loss_sum(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> tuple[Tensor, Stats]:
    """Estimated KL(policy || reference) summed over the tokens; arguments are [R]. Gradient flows into `logprobs`."""
    loss = kl_estimate(logprobs, ref_logprobs, estimator).sum()
    return loss, _detached({"kl_loss": loss})


def value_loss_sum(values: Tensor, old_values: Tensor, returns: Tensor, clip_eps: float) -> tuple[Tensor, Stats]:
    """sum_t 0.5 max((V_t - R_t)^2, (clip(V_t, V_old -+ eps) - R_t)^2); arguments are [R]. `clip_eps` 0: no clip."""
    # the bounds are clamped to, not the difference: inside them a value keeps every bit
    clipped_values = torch.clamp(values, old_values - clip_eps, old_values + clip_eps) if clip_eps else values
    plain, clipped = (values - returns).square(), (clipped_values - returns).square()
    loss = 0.5 * torch.maximum(plain, clipped).sum()
    residual, wide = (returns - values).double(), returns.double()
    stats = {
        "vf_loss": loss,
        "vf_clipfrac": (clipped > plain).sum(),
        "vpred": values.double().sum(),
        "residual": residual.sum(),
        "residual_squared": residual.square().sum(),
        "return": wide.sum(),
        "return_squared": wide.square().sum(),
    }
    return loss, _detached(stats)


def _detached(stats: Stats) -> Stats:
    return {name: value.detach().double() for name, value in stats.items()}


def add_stats(total: Stats, more: Stats) -> Stats:
    """Sums over the tokens of both; names that only one of them has are kept."""
    return {
        name: total[name] + more[name] if name in total and name in more else {**total, **more}[name]
        for name in {**total, **more}
    }


def actor_metrics(stats: Mapping[str, Tensor | float], tokens: int) -> dict[str, float]:
    """Means over `tokens` response tokens under the names of the metrics file."""
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy")
    return {f"actor/{name}": float(stats[name]) / tokens for name in names if name in stats}


def critic_metrics(stats: Mapping[str, Tensor | float], tokens: int) -> dict[str, float]:
    """Means over `tokens` response tokens, and 1 - Var(return - value) / Var(return)."""
    mean = {name: float(value) / tokens for name, value in stats.items()}
    residual = mean["residual_squared"] - mean["residual"] ** 2
    spread = mean["return_squared"] - mean["return"] ** 2
    return {
        "critic/vf_loss": mean["vf_loss"],
        "critic/vf_clipfrac": mean["vf_clipfrac"],
        "critic/vpred_mean": mean["vpred"],
        "critic/vf_explained_var": 1 - residual / spread if spread > 0 else 0.0,
    }
