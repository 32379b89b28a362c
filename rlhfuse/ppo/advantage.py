"""Token rewards, advantages and returns of a whole batch, without a loop over tokens.

Reward of response token t: -kl_coef * kl_t, plus the score of the sample at its last token (a sample cut at the
length limit ends there too: no bootstrap). With delta_t = r_t + gamma V_{t+1} - V_t, and V = 0 after the end,

    A_i = sum_{j >= i} (gamma lam)^(j-i) delta_j        that is  A = delta @ D,  D[j, i] = (gamma lam)^(j-i), j >= i

one matrix product instead of the recursion A_t = delta_t + gamma lam A_{t+1} (paper section 6; Schulman et al.
2016). Long responses are cut into blocks of BLOCK tokens: all blocks of all samples go through the same product,
then what follows a block enters it through its first advantage, carried from right to left.

Responses are one piece here; there are no gaps between turns. Arithmetic is float64, results are float32.
Knows nothing of models or ranks: every rank computes the same from the same batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.config import AlgorithmConfig
from rlhfuse.ppo.rollout import RolloutBatch, segment_index

BLOCK = 256  # a D of 256 x 256 stays small, and few blocks are carried
LOG_RATIO_LIMIT = 20.0  # exp(20) is still far from overflow
K3_LIMIT = 10.0  # one improbable token must not outweigh the rest of the batch


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled token (Schulman, "Approximating KL").

    With x = log(policy / reference): k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x.
    """
    log_ratio = (logprobs - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return (torch.expm1(-log_ratio) + log_ratio).clamp(max=K3_LIMIT)
    raise AssertionError(f"kl estimator {estimator!r}: the configuration allows k1, k2, k3")


def shaped_scores(batch: RolloutBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Scores after clipping and the penalty of truncated samples: float32 [N]."""
    scores = batch.scores
    if algorithm.score_clip > 0:
        scores = scores.clamp(-algorithm.score_clip, algorithm.score_clip)
    return scores - algorithm.missing_eos_penalty * batch.truncated.to(scores.dtype)


def add_token_rewards(batch: RolloutBatch, algorithm: AlgorithmConfig) -> RolloutBatch:
    """The batch with `token_rewards`; needs old_logprobs, ref_logprobs and scores."""
    kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, algorithm.kl_estimator)
    last = batch.response_lengths.cumsum(0) - 1
    scores = shaped_scores(batch, algorithm)
    return batch.with_fields(token_rewards=(-algorithm.kl_coef * kl).index_add(0, last, scores))


def add_advantages(batch: RolloutBatch, algorithm: AlgorithmConfig) -> RolloutBatch:
    """The batch with `advantages` (whitened if so configured) and `returns` (never whitened).

    Needs values and token_rewards. Must see the whole batch of the iteration: whitening counts every token.
    """
    advantages = generalized_advantages(
        batch.token_rewards, batch.values, batch.response_lengths, algorithm.gamma, algorithm.lam
    )
    returns = (advantages + batch.values.double()).float()
    if algorithm.whitens:
        advantages = whiten(advantages)
    return batch.with_fields(advantages=advantages.float(), returns=returns)


def generalized_advantages(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """A of each token; rewards and values are flat [R], `lengths` [N] says how many belong to each sample.

    Returns float64 [R].
    """
    rewards, values = rewards.double(), values.double()
    following = torch.cat([values[1:], values.new_zeros(1)])
    following[lengths.cumsum(0) - 1] = 0.0  # nothing follows the last token
    deltas = rewards + gamma * following - values
    # rows of whole blocks: column t of row n is token t of sample n
    blocks = -(-int(lengths.max()) // BLOCK)
    rows = torch.arange(len(lengths), device=lengths.device) * (blocks * BLOCK)
    place = segment_index(rows, lengths)
    padded = deltas.new_zeros(len(lengths) * blocks * BLOCK)
    padded[place] = deltas
    return _discounted_suffix_sums(padded.view(len(lengths), blocks, BLOCK), gamma * lam).flatten()[place]


def _discounted_suffix_sums(deltas: Tensor, decay: float) -> Tensor:
    """out[n, i] = sum over j >= i of decay^(j-i) deltas[n, j], with each row cut in blocks: [N, blocks, BLOCK]."""
    steps = torch.arange(BLOCK, device=deltas.device)
    exponent = steps[:, None] - steps[None, :]
    matrix = torch.where(exponent >= 0, decay ** exponent.clamp(min=0).to(deltas.dtype), deltas.new_zeros(()))
    sums = deltas @ matrix
    distance = decay ** (BLOCK - steps).to(deltas.dtype)  # from a token to the first one of the next block
    for block in range(deltas.shape[1] - 2, -1, -1):
        sums[:, block] += sums[:, block + 1, :1] * distance
    return sums


def whiten(values: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift to mean 0 and scale to variance 1 over all entries (the variance divides by their number)."""
    wide = values.double()
    centred = wide - wide.mean()
    return (centred * torch.rsqrt(centred.square().mean() + eps)).to(values.dtype)
