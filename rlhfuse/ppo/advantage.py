"""Advantages and returns of a whole batch, by algorithm.

    ppo          GAE with the critic's values                                  (Schulman et al. 2016; gae.py)
    grpo         (R - mean) / std of the prompt's samples, for every token     (Shao et al. 2024; Liu et al. 2025
                                                                                without the division)
    rloo         R - mean of the prompt's other samples, for every token       (Ahmadian et al. 2024)
    reinforce++  sum of the token rewards still to come, whitened              (Hu 2025)

R is the sum of a sample's token rewards, so a KL in the reward counts in all of them. Whitening runs over every
token of the batch. Responses are one piece here. Arithmetic is float64, results are float32. Knows nothing of
models or ranks: every rank computes the same from the same batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.errors import InputError
from rlhfuse.ppo.gae import discounted_returns, generalized_advantages
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.ppo.token_rewards import sample_rewards

GROUP_STD_EPS = 1e-6  # samples of one prompt may all have the same score


def add_advantages(batch: RolloutBatch, algorithm: AlgorithmConfig, groups: Tensor | None = None) -> RolloutBatch:
    """The batch with `advantages` (whitened if so configured) and `returns` (never whitened).

    Needs token_rewards, and values with ppo. `groups` [N] numbers the prompt of each sample; grpo and rloo need it.
    Must see the whole batch of the iteration: groups and whitening count every sample.
    """
    if algorithm.name == "ppo":
        advantages = generalized_advantages(
            batch.token_rewards, batch.values, batch.response_lengths, algorithm.gamma, algorithm.lam
        )
        returns = advantages + batch.values.double()
    elif algorithm.name == "reinforce++":
        advantages = returns = discounted_returns(batch.token_rewards, batch.response_lengths, algorithm.gamma)
    else:
        rewards = sample_rewards(batch)
        compared = (
            leave_one_out(rewards, groups)
            if algorithm.name == "rloo"
            else group_normalised(rewards, groups, algorithm.group_std)
        )
        advantages, returns = (each.repeat_interleave(batch.response_lengths) for each in (compared, rewards))
    if algorithm.whitens:
        advantages = whiten(advantages)
    return batch.with_fields(advantages=advantages.float(), returns=returns.float())


def group_normalised(rewards: Tensor, groups: Tensor, divide: bool = True) -> Tensor:
    """Rewards [N] minus their group's mean and, with `divide`, over its standard deviation (of n - 1): float64 [N].

    Raises InputError for a group of one.
    """
    rewards, (number, counts) = rewards.double(), _numbered(groups)
    centred = rewards - _group_sums(rewards, number, counts)[number] / counts[number]
    if not divide:
        return centred
    variance = _group_sums(centred.square(), number, counts) / (counts - 1)
    return centred / (variance.sqrt() + GROUP_STD_EPS)[number]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards [N] minus the mean of the others of their group: float64 [N]. Raises InputError for a group of one."""
    rewards, (number, counts) = rewards.double(), _numbered(groups)
    others = _group_sums(rewards, number, counts)[number] - rewards
    return rewards - others / (counts - 1)[number]


def _numbered(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each sample's group, from 0, and samples of each group."""
    known, number, counts = groups.unique(return_inverse=True, return_counts=True)
    if len(counts) and int(counts.min()) < 2:
        raise InputError(
            f"prompt {int(known[counts.argmin()])} has one sample: there is none to compare it with; "
            "set rollout.samples_per_prompt to at least 2"
        )
    return number, counts


def _group_sums(values: Tensor, number: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(len(counts)).index_add(0, number, values)


def whiten(values: Tensor, eps: float = 1e-8, mask: Tensor | None = None) -> Tensor:
    """Shift to mean 0 and scale to variance 1 over all entries (the variance divides by their number).

    With `mask` only the entries where it is True count; the others come out as 0.
    """
    if mask is not None:
        out = torch.zeros_like(values)
        out[mask] = whiten(values[mask], eps)
        return out
    if not len(values):
        return values
    wide = values.double()
    centred = wide - wide.mean()
    return (centred * torch.rsqrt(centred.square().mean() + eps)).to(values.dtype)
