"""The losses and their statistics, token by token (Schulman et al. 2017), and the one number that they add up to.

Each term is a sum of its tokens' losses with weights, over a number that the whole mini-batch decides (`LossTerms`),
over all ranks and micro-batches: then neither micro-batch size nor layout changes a gradient, and ranks simply add.
C: response tokens that count; a sample's lie side by side, in one micro-batch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.rollout import RolloutBatch, given
from rlhfuse.ppo.token_rewards import LOG_RATIO_LIMIT, kl_estimate

# Statistics whose means go into the metrics file
METRICS = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy")
METRICS += ("vf_loss", "vf_clipfrac", "vpred_mean")
Stats = dict[str, Tensor]  # name -> float64 scalar, a sum over tokens; detached


@dataclass(frozen=True)
class LossTerm:
    """coefficient * sum over tokens of weight * loss / divisor; a weight is 1, or 1 / counted tokens of the sample."""

    coefficient: float
    divisor: float
    sample_means: bool


@dataclass(frozen=True)
class LossTerms:
    """All terms of a loss. A sample without a counted token counts as a sample.

    term     coefficient       aggregated as
    policy   1                 loss_agg_mode; with gspo and sapo seq-mean-token-mean
    kl       kl_coef           loss_agg_mode
    entropy  -entropy_coef     loss_agg_mode
    value    value_loss_coef   loss_agg_mode
    """

    terms: Mapping[str, LossTerm]

    @staticmethod
    def of(algorithm: AlgorithmConfig, minibatch: RolloutBatch) -> LossTerms:
        """The terms of a whole mini-batch, before it is cut."""
        samples = len(minibatch)
        divisors = {
            "token-mean": max(minibatch.counted_tokens, 1),
            "token-sum": 1,
            "seq-mean-token-sum": samples,
            "seq-mean-token-mean": samples,
            "seq-mean-token-sum-norm": samples * algorithm.loss_scale_factor,
        }

        def term(coefficient: float, mode: str) -> LossTerm:
            return LossTerm(coefficient, divisors[mode], mode == "seq-mean-token-mean")

        mode = algorithm.loss_agg_mode
        policy_mode = "seq-mean-token-mean" if algorithm.policy_loss.by_sample else mode
        return LossTerms(
            {
                "policy": term(1.0, policy_mode),
                "kl": term(algorithm.kl_coef if algorithm.kl_place == "loss" else 0.0, mode),
                "entropy": term(-algorithm.entropy_coef, mode),
                "value": term(algorithm.value_loss_coef, mode),
            }
        )

    def total(self, losses: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        """Some tokens' part of the loss, by term [C]; `sizes` [C]: how many tokens of each one's sample count."""
        sums: dict[float, Tensor] = {}
        for name, loss in losses.items():
            term = self.terms[name]
            if term.sample_means:
                loss = loss / sizes
            part = term.coefficient * loss.sum()
            sums[term.divisor] = sums[term.divisor] + part if term.divisor in sums else part
        return reduce(operator.add, (total / divisor for divisor, total in sums.items()))


def per_token(values: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """Each sample's value [N] for all its `tokens` [C], for which a device need not be asked."""
    return values.repeat_interleave(lengths, output_size=tokens)


def highest_entropies(minibatch: RolloutBatch, quantile: float) -> Tensor:
    """Which tokens (bool [R]) have an entropy at or above the (1 - quantile)-th of those that count; 0: the highest.

    A quantile between two tokens keeps the upper one (Wang et al. 2025, "Beyond the 80/20 rule").
    """
    entropies = given(minibatch.entropies)
    seen = entropies if minibatch.counted is None else entropies[minibatch.counted]
    if not len(seen):
        return torch.ones_like(entropies, dtype=torch.bool)
    place = math.ceil((1 - quantile) * (len(seen) - 1) - 1e-9)  # 1 - 0.7 is more than 0.3
    return entropies >= seen.kthvalue(place + 1).values


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, lengths: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Stats]:
    """Loss of each token by `policy_loss.loss_mode`; but for `lengths` [N] arguments are [C].

    vanilla, gspo  max(-A r, -A clip(r, 1 - eps, 1 + eps_high)); dual_clip c: where A < 0 at most -A c (Ye et al. 2020)
    cispo          -A sg(clip(r, 1 - eps, 1 + eps_high)) logprob                                (MiniMax-M1, 2025)
    sapo           -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A                        (Gao et al. 2025)

    r = exp(logprob - old logprob), for gspo of the mean over the sample, by value (Zheng et al. 2025). The logarithm is
    clamped. `clip_eps_high` (DAPO's clip-higher) 0: the same as `clip_eps`. Gradient flows into `logprobs`.
    """
    mode = algorithm.policy_loss.loss_mode
    log_ratio = logprobs - old_logprobs
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if mode == "gspo":
        ratio = _sample_ratio(logprobs, log_ratio, lengths)
    else:
        ratio = clamped.exp()
    if mode == "sapo":
        losses, stats = _gated(ratio, advantages, algorithm), {}
    elif mode == "cispo":
        weight = ratio.detach().clamp(1 - algorithm.clip_eps, _highest(algorithm))
        losses, stats = -advantages * weight * logprobs, {"pg_clipfrac": (weight != ratio).sum()}
    else:
        losses, stats = _clipped(ratio, advantages, algorithm)
    stats |= {
        "pg_loss": losses.sum(),
        "ppo_kl": -clamped.double().sum(),  # k1 of KL(old || new): the samples are the old policy's
        "logprob_abs_diff": log_ratio.abs().double().sum(),
    }
    return losses, _detached(stats)


def _highest(algorithm: AlgorithmConfig) -> float:
    """Ratio above which is clipped."""
    return 1 + (algorithm.clip_eps_high or algorithm.clip_eps)


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Stats]:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_eps, _highest(algorithm))
    worse = torch.maximum(plain, clipped)
    stats = {"pg_clipfrac": (clipped > plain).sum()}
    if algorithm.dual_clip:
        bound = -advantages * algorithm.dual_clip
        bounded = (advantages < 0) & (worse > bound)
        worse = torch.where(bounded, bound, worse)
        stats["pg_clipfrac_lower"] = bounded.sum()
    return worse, stats


def _sample_ratio(logprobs: Tensor, log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """The exponential of each sample's mean log-ratio, for each token with the gradient of its own log-probability."""
    # Summed sample by sample, whatever lies beside it; `unsafe` leaves out a check for which a device would be asked.
    sums = torch.segment_reduce(log_ratio.detach().double(), "sum", lengths=lengths, unsafe=True)
    means = per_token(sums / lengths.clamp(min=1), lengths, len(log_ratio))
    return (means.to(logprobs.dtype) + (logprobs - logprobs.detach())).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _gated(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    loss = algorithm.policy_loss
    tau = torch.full_like(ratio, loss.tau_neg).masked_fill(advantages > 0, loss.tau_pos)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> tuple[Tensor, Stats]:
    """Estimated KL(policy || reference) of each token; arguments are [C]. Gradient flows into `logprobs`."""
    losses = kl_estimate(logprobs, ref_logprobs, estimator)
    return losses, _detached({"kl_loss": losses.sum()})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_eps: float) -> tuple[Tensor, Stats]:
    """0.5 max((V - R)^2, (clip(V, V_old -+ eps) - R)^2) of each token; arguments are [C]. `clip_eps` 0: no clip."""
    # the bounds are clamped to, not the difference: inside them a value keeps every bit
    clipped_values = torch.clamp(values, old_values - clip_eps, old_values + clip_eps) if clip_eps else values
    plain, clipped = (values - returns).square(), (clipped_values - returns).square()
    losses = 0.5 * torch.maximum(plain, clipped)
    residual, wide = (returns - values).double(), returns.double()
    stats = {
        "vf_loss": losses.sum(),
        "vf_clipfrac": (clipped > plain).sum(),
        "vpred_mean": values.double().sum(),
        "residual": residual.sum(),
        "residual_squared": residual.square().sum(),
        "return": wide.sum(),
        "return_squared": wide.square().sum(),
    }
    return losses, _detached(stats)


def _detached(stats: Stats) -> Stats:
    return {name: value.detach().double() for name, value in stats.items()}


def add_stats(total: Stats, more: Stats) -> Stats:
    """Sums over the tokens of both; names that only one of them has are kept."""
    return {
        name: total[name] + more[name] if name in total and name in more else {**total, **more}[name]
        for name in {**total, **more}
    }


def loss_metrics(role: str, stats: Mapping[str, Tensor | float], tokens: int) -> dict[str, float]:
    """Means over `tokens` response tokens that count, under the names of the metrics file.

    Of values also 1 - Var(return - value) / Var(return).
    """
    mean = {name: float(value) / max(tokens, 1) for name, value in stats.items()}
    metrics = {f"{role}/{name}": mean[name] for name in METRICS if name in mean}
    if "residual" in mean:
        residual = mean["residual_squared"] - mean["residual"] ** 2
        spread = mean["return_squared"] - mean["return"] ** 2
        metrics[f"{role}/vf_explained_var"] = 1 - residual / spread if spread > 0 else 0.0
    return metrics
