"""Discounted sums over packed responses as matrix products: generalized advantages, and returns without a critic.

With delta_t = r_t + gamma V_{t+1} - V_t, and V = 0 after the end,

    A_i = sum_{j >= i} (gamma lam)^(j-i) delta_j        that is  A = delta @ D,  D[j, i] = (gamma lam)^(j-i), j >= i

one matrix product instead of the recursion A_t = delta_t + gamma lam A_{t+1} (paper section 6; Schulman et al.
2016). D never grows with the response: every response is cut into blocks of BLOCK tokens, and all blocks of all
samples, without padding between samples, go through the same product. What follows a block enters it through its
first sum alone, carried from the last block of a sample to its first.

Arithmetic is float64. Products have a fixed shape, so that a token's bits depend on its own sample and not on what
else is in the batch. Knows nothing of scores, models or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.ppo.rollout import segment_index

BLOCK = 128  # a D of 128 x 128 stays in the cache, and 8192 tokens are only 64 blocks to carry over
ROWS = 64  # blocks in one product


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float, mask: Tensor | None = None
) -> Tensor:
    """A of each token, float64 [R]; `rewards` and `values` are flat [R], `lengths` [N] says how many each sample has.

    `mask` [R] is True for tokens that count (default: all). The rest are as if they were not there: what follows a
    gap is carried over it, their rewards and values are never read, their advantage is 0.
    """
    if mask is not None:
        return _without_gaps(
            lambda r, v, n: generalized_advantages(r, v, n, gamma, lam), (rewards, values), lengths, mask
        )
    rewards, values = rewards.double(), values.double()
    following = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values
    following[(lengths.cumsum(0) - 1)[lengths > 0]] = 0.0  # nothing follows the last token
    return discounted_sums(rewards + gamma * following - values, lengths, gamma * lam)


def discounted_returns(rewards: Tensor, lengths: Tensor, gamma: float, mask: Tensor | None = None) -> Tensor:
    """sum over j >= i of gamma^(j-i) rewards[j], within each sample: float64 [R]; `mask` as above."""
    if mask is not None:
        return _without_gaps(lambda r, n: discounted_returns(r, n, gamma), (rewards,), lengths, mask)
    return discounted_sums(rewards.double(), lengths, gamma)


def discounted_sums(terms: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """out[i] = sum over j >= i of decay^(j-i) terms[j], j in the sample of i; float64 [R] in and out."""
    if not len(terms):
        return terms
    blocks = (lengths + BLOCK - 1) // BLOCK
    first = blocks.cumsum(0) - blocks  # row of each sample's first block
    rows = -(-int(blocks.sum()) // ROWS) * ROWS
    place = segment_index(first * BLOCK, lengths)
    padded = terms.new_zeros(rows * BLOCK)
    padded[place] = terms
    sums = _block_sums(padded.view(rows, BLOCK), decay)
    return (sums + _carried(sums[:, 0], first, blocks, decay)).flatten()[place]


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


def _without_gaps(function, arrays: tuple[Tensor, ...], lengths: Tensor, mask: Tensor) -> Tensor:
    """`function` of the arrays with the masked tokens taken out, its result put back with zeros for them."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    kept = torch.zeros_like(lengths).index_add(0, owner, mask.to(lengths.dtype))
    out = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    out[mask] = function(*(array[mask] for array in arrays), kept)
    return out
