"""Batches of samples whose log-probabilities are chosen, for the tests of ppo/."""

from collections.abc import Sequence

import torch

from rlhfuse.ppo.rollout import Rollout, RolloutBatch


def batch_of(
    scores: Sequence[float | None], ratios: Sequence[Sequence[float]] | None = None, first: int = 0
) -> RolloutBatch:
    """Samples `first`, ... whose tokens have old log-probabilities of -1 and these log-ratios to the reference.

    Without `ratios` they have one token each, and no reference.
    """
    rollouts = []
    for i, score in enumerate(scores):
        old = torch.full((len(ratios[i]) if ratios else 1,), -1.0)
        ref = old - torch.tensor(ratios[i]) if ratios else None
        rollouts.append(Rollout(first + i, (1,), (2,) * len(old), old, "stop", ref, score=score))
    return RolloutBatch.from_rollouts(rollouts)
