"""From a sample's score to the reward of each of its tokens.

    score of a sample   clip(scale * score) - penalties of length, of a missing end, of being overlong
    reward of token t   -kl_coef * kl_t (where the KL is part of the reward), plus the score at the last token

A sample cut at the length limit ends there too: no bootstrap. The KL is estimated from the sampled token alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.settings import RewardConfig
from rlhfuse.ppo.rollout import RolloutBatch, given

LOG_RATIO_LIMIT = 20.0  # exp(20) is still far from overflow
K3_LIMIT = 10.0  # one improbable token must not outweigh the rest of the batch


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled token (Schulman, "Approximating KL divergence").

    With x = log(policy / reference), clamped: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x, capped, abs = |x|. With +
    behind it: that value, and in `logprobs` the gradient of k2 of the ratio that is not clamped.
    """
    if estimator.endswith("+"):
        value, apart = kl_estimate(logprobs, ref_logprobs, estimator[:-1]), logprobs - ref_logprobs
        return value.detach() + apart.detach() * (logprobs - logprobs.detach())
    log_ratio = (logprobs - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return (torch.expm1(-log_ratio) + log_ratio).clamp(max=K3_LIMIT)
    raise AssertionError(f"kl estimator {estimator!r}: the configuration allows k1, k2, k3, abs")


def combine_rewards(batch: RolloutBatch, function_scores: Mapping[int, float], reward: RewardConfig) -> RolloutBatch:
    """The batch with `scores` [N]: the reward model's and the function's (by sample id, may be empty), weighted."""
    scores = None if batch.scores is None else reward.model_weight * batch.scores
    if function_scores:
        weighted = weighted_scores([function_scores[sample] for sample in batch.sample_ids.tolist()], reward)
        scores = weighted if scores is None else scores + weighted
    return batch.with_fields(scores=scores)


def weighted_scores(function_scores: Sequence[float], reward: RewardConfig) -> Tensor:
    """The function's part of scores: float32 [N]."""
    return reward.function_weight * torch.tensor(function_scores, dtype=torch.float32)


def shaped_scores(batch: RolloutBatch, algorithm: AlgorithmConfig, max_response_tokens: int) -> Tensor:
    """Scores after scaling, clipping and penalties: float32 [N]."""
    scores = given(batch.scores) * algorithm.score_scale
    if algorithm.score_clip > 0:
        scores = scores.clamp(-algorithm.score_clip, algorithm.score_clip)
    scores = scores - algorithm.missing_eos_penalty * batch.truncated.to(scores.dtype)
    if algorithm.length_penalty:
        scores = scores - algorithm.length_penalty * batch.response_lengths / max_response_tokens
    if algorithm.overlong_penalty:
        # 0 up to `overlong_tokens` before the limit, rising to 1 at it (DAPO, Yu et al. 2025, eq. 13)
        begin = max_response_tokens - algorithm.overlong_tokens
        late = ((batch.response_lengths - begin) / algorithm.overlong_tokens).clamp(0, 1).float()
        scores = scores - algorithm.overlong_penalty * late
    return scores


def add_token_rewards(batch: RolloutBatch, algorithm: AlgorithmConfig, max_response_tokens: int) -> RolloutBatch:
    """The batch with `token_rewards`; needs scores, and ref_logprobs where the KL is part of the reward."""
    rewards = torch.zeros_like(batch.old_logprobs)
    if algorithm.kl_place == "reward" and algorithm.kl_coef:
        kl = kl_estimate(batch.old_logprobs, given(batch.ref_logprobs), algorithm.estimator)
        rewards = -algorithm.kl_coef * kl
    last = batch.drawn_lengths.cumsum(0) - 1
    scores = shaped_scores(batch, algorithm, max_response_tokens)
    return batch.with_fields(token_rewards=rewards.index_add(0, last, scores))


def sample_rewards(batch: RolloutBatch) -> Tensor:
    """Sum of each sample's token rewards: float64 [N]."""
    return _sum_per_sample(batch, given(batch.token_rewards))


def sample_kl(batch: RolloutBatch) -> Tensor:
    """k1 of KL(old || reference) summed over each sample's tokens, in nats: float64 [N]; needs ref_logprobs."""
    return _sum_per_sample(batch, kl_estimate(batch.old_logprobs, given(batch.ref_logprobs), "k1"))


def _sum_per_sample(batch: RolloutBatch, values: Tensor) -> Tensor:
    """Sums of the drawn tokens' values [R] of each sample: float64 [N]."""
    sums = torch.zeros(len(batch), dtype=torch.float64, device=batch.tokens.device)
    return sums.index_add(0, batch.owners, values.double())
