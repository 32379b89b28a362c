"""Metrics of a batch with advantages and returns, under the names that RLHF dashboards know.

`critic/score` is the combined score, `critic/rewards` the sum of a sample's token rewards (KL included); lengths are
in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.ppo.token_rewards import kl_estimate, sample_rewards


def batch_metrics(batch: RolloutBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Mean, max and min of scores, rewards, advantages, returns, lengths; values, KL and scale where there are any.

    Samples that failed are in the lengths alone.
    """
    metrics, intact = {}, batch.intact
    for name, array in (
        ("critic/score", intact.scores),
        ("critic/rewards", sample_rewards(intact)),
        ("critic/values", intact.values),
        ("critic/advantages", intact.advantages),
        ("critic/returns", intact.returns),
        ("response_length", batch.response_lengths),
        ("prompt_length", batch.prompt_lengths),
    ):
        if array is not None and len(array):
            wide = array.double()
            spread = {"mean": wide.mean(), "max": wide.max(), "min": wide.min()}
            metrics |= {f"{name}/{which}": float(value) for which, value in spread.items()}
    if intact.scores is not None and len(intact):
        metrics["critic/score/std"] = float(intact.scores.double().std(correction=0))
    if intact.ref_logprobs is not None and len(intact):
        kl = kl_estimate(intact.old_logprobs, intact.ref_logprobs, algorithm.estimator)
        metrics["actor/ref_kl"] = float(kl.double().mean())
        metrics["actor/kl_coef"] = algorithm.kl_coef
    if algorithm.scale_scores:
        metrics["critic/score_scale"] = algorithm.score_scale
    metrics["response_length/clip_ratio"] = float(batch.truncated.double().mean())
    return metrics


def balance_metrics(lengths: Sequence[int], parts: Sequence[int]) -> dict[str, float]:
    """Tokens of the lightest and heaviest micro-batch: of `lengths` cut in given order, and of the balanced `parts`."""
    plain = [int(part.sum()) for part in torch.tensor(lengths).tensor_split(len(parts))]
    return {
        "global_seqlen/min": min(plain),
        "global_seqlen/max": max(plain),
        "global_seqlen/balanced_min": min(parts),
        "global_seqlen/balanced_max": max(parts),
    }
