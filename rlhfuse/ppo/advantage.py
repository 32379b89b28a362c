"""Advantages and returns of a whole batch, by algorithm; R is the sum of a sample's token rewards.

ppo          GAE with the critic's values, as matrix products (Schulman et al. 2016; paper section 6)
grpo         (R - mean) / std of the prompt's samples (Shao et al. 2024; without the division: Liu et al. 2025)
rloo         R - mean of the prompt's other samples (Ahmadian et al. 2024)
reinforce++  sum of the token rewards still to come, whitened (Hu 2025); its _baseline: R - mean, whitened over tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.rollout import RolloutBatch, given, segment_index
from rlhfuse.ppo.token_rewards import sample_rewards

BLOCK = 128  # a D of 128 x 128 stays in the cache, and 8192 tokens are only 64 blocks to carry over
ROWS = 64  # blocks in one product
GROUP_STD_EPS = 1e-6  # samples of one prompt may all have the same score
WHITE_EPS = 1e-8  # of a variance


def add_advantages(batch: RolloutBatch, algorithm: AlgorithmConfig, groups: Tensor | None = None) -> RolloutBatch:
    """The batch with `advantages` (whitened if so configured) and `returns` (never whitened).

    Needs token_rewards, and values with ppo. `groups` [N] numbers the prompt of each sample, where they are compared.
    Must see the whole batch of the iteration: groups count every sample that has not failed, and whitening every token
    that counts. A group of which fewer than two samples are left has failed as a whole.
    """
    compute = ADVANTAGES[algorithm.row.advantage]
    if algorithm.groups:
        batch = _counting_groups(batch, given(groups))
        rewards, counts = sample_rewards(batch), ~batch.failed if batch.failed is not None else slice(None)
        compared = torch.zeros_like(rewards)  # of samples that failed
        compared[counts] = compute(rewards[counts], given(groups)[counts], algorithm)
        advantages, returns = (each.repeat_interleave(batch.drawn_lengths) for each in (compared, rewards))
    else:
        advantages, returns = compute(batch, algorithm)
    if algorithm.whitens:
        advantages = whiten(advantages, batch.counted)
    return batch.with_fields(advantages=advantages.float(), returns=returns.float())


def _counting_groups(batch: RolloutBatch, groups: Tensor) -> RolloutBatch:
    """The batch in which groups have failed as a whole where there is nothing to compare with."""
    if batch.failed is None:
        return batch
    _, number = groups.unique(return_inverse=True)
    left = torch.zeros_like(number).index_add(0, number, (~batch.failed).long())
    failed = batch.failed | (left < 2)[number]
    return batch.with_fields(failed=failed).counting(~failed)


def _gae(batch: RolloutBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    rewards, values = given(batch.token_rewards), given(batch.values)
    advantages = generalized_advantages(rewards, values, batch.drawn_lengths, algorithm.gamma, algorithm.lam)
    return advantages, advantages + values.double()


def _rewards_to_go(batch: RolloutBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    sums = discounted_sums(given(batch.token_rewards).double(), batch.drawn_lengths, algorithm.gamma)
    return sums, sums


def spared_samples(batch: RolloutBatch, algorithm: AlgorithmConfig) -> frozenset[int]:
    """Positions of the samples that training leaves out: advantages that count, and so the gradient, are exactly 0."""
    if not algorithm.skips:
        return frozenset()
    some = given(batch.advantages) != 0
    held = batch.owners[some if batch.counted is None else some & batch.counted]
    return frozenset(range(len(batch))).difference(held.unique().tolist())


def group_normalised(rewards: Tensor, groups: Tensor, divide: bool = True) -> Tensor:
    """Rewards [N] minus their group's mean, with `divide` over its deviation (of n - 1); float64."""
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


# Name in the table of algorithms -> function. One that compares samples takes (rewards [N], groups [N], settings) of
# those that have not failed and returns float64 [N]; others take (batch, settings) and return advantages and returns.
ADVANTAGES: dict[str, Callable[..., Any]] = {
    "gae": _gae,
    "rewards_to_go": _rewards_to_go,
    "group_normalised": lambda rewards, groups, algorithm: group_normalised(rewards, groups, algorithm.group_std),
    "group_centred": lambda rewards, groups, _: group_normalised(rewards, groups, divide=False),
    "leave_one_out": lambda rewards, groups, _: leave_one_out(rewards, groups),
}


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


def whiten(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Shift to mean 0 and variance 1 (over n) of those that are `counted`, by default all; none: as they are."""
    wide = values.double()
    seen = wide if counted is None else wide[counted]
    if counted is not None and not len(seen):
        return values
    mean = seen.mean()
    return ((wide - mean) * torch.rsqrt((seen - mean).square().mean() + WHITE_EPS)).to(values.dtype)


def generalized_advantages(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """A_i = sum over j >= i of (gamma lam)^(j-i) (r_j + gamma V_{j+1} - V_j), V = 0 after the end: float64 [R].

    `rewards` and `values` are flat [R], `lengths` [N] says how many each sample has.
    """
    rewards, values = rewards.double(), values.double()
    following = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values
    following[(lengths.cumsum(0) - 1)[lengths > 0]] = 0.0  # nothing follows the last token
    return discounted_sums(rewards + gamma * following - values, lengths, gamma * lam)


def discounted_sums(terms: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """out[i] = sum over j >= i of decay^(j-i) terms[j], j in the sample of i; float64 [R] in and out.

    One product with D[j, i] = decay^(j-i), j >= i, for each block of BLOCK tokens, without padding between samples.
    What follows a block enters it through its first sum. Products have one shape: bits do not depend on the batch.
    """
    if not len(terms):
        return terms
    blocks = (lengths + BLOCK - 1) // BLOCK
    first = blocks.cumsum(0) - blocks  # row of each sample's first block
    rows = -(-int(blocks.sum()) // ROWS) * ROWS
    position = segment_index(first * BLOCK, lengths)
    padded = terms.new_zeros(rows * BLOCK)
    padded[position] = terms
    sums = _block_sums(padded.view(rows, BLOCK), decay)
    return (sums + _carried(sums[:, 0], first, blocks, decay)).flatten()[position]


def _block_sums(terms: Tensor, decay: float) -> Tensor:
    """Each row [rows, BLOCK] by itself."""
    steps = torch.arange(BLOCK, device=terms.device)
    exponent = steps[:, None] - steps[None, :]
    matrix = torch.where(exponent >= 0, decay ** exponent.clamp(min=0).to(terms.dtype), terms.new_zeros(()))
    sums = torch.empty_like(terms)
    for start in range(0, len(terms), ROWS):
        torch.matmul(terms[start : start + ROWS], matrix, out=sums[start : start + ROWS])
    return sums


def _carried(own: Tensor, first: Tensor, blocks: Tensor, decay: float) -> Tensor:
    """What the blocks behind it add to each row: [rows, BLOCK]; `own` is the first sum of each row by itself."""
    total = own.clone()  # first sum of each row with everything behind it
    behind = torch.zeros_like(own)
    last, deepest = first + blocks - 1, int(blocks.max())
    for depth in range(1, deepest):  # all samples at once, from their last blocks on
        rows = last[blocks > depth] - depth
        behind[rows] = total[rows + 1]
        total[rows] += decay**BLOCK * behind[rows]
    steps = torch.arange(BLOCK, device=own.device)
    return behind[:, None] * decay ** (BLOCK - steps).to(own.dtype)
