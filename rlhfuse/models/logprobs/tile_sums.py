"""What a softmax needs of a tile of logits, and the tile's gradient: plain torch, or Triton on CUDA.

A tile is of some rows and of all columns of this tensor rank. Its sums are one tensor [4, R] float32: the largest logit
m, the sums of exp(z - m) and of exp(z - m) (z - m), and the target's logit, 0 where another tensor rank has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# [R] each: logarithm of the softmax's denominator, entropy, derivatives of the loss by log-probability and by entropy
Known = tuple[Tensor, Tensor, Tensor, Tensor | None]


def tile_sums(logits_RW: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
    """Sums [4, R] of a tile, contiguous and float32. Targets outside 0..W-1 are other tensor ranks'."""
    if logits_RW.is_cuda:
        return _kernels().tile_sums(logits_RW, targets_R, temperature)
    z = logits_RW / temperature
    inside, place = _inside(targets_R, z.shape[1])
    picked = torch.where(inside, z.gather(1, place)[:, 0], 0.0)
    top = z.amax(dim=1)
    weights = z.sub_(top[:, None]).exp()
    return torch.stack([top, weights.sum(dim=1), z.mul_(weights).sum(dim=1), picked])


def tile_gradient(logits_RW: Tensor, targets_R: Tensor, temperature: float, known: Known, out_RW: Tensor) -> Tensor:
    """Gradient [R, W] of the logits, which are overwritten, in `out`: (target - p) dl - p (log p + entropy) dh."""
    if logits_RW.is_cuda:
        return _kernels().tile_gradient(logits_RW, targets_R, temperature, known, out_RW)
    log_total_R, entropy_R, by_logprob_R, by_entropy_R = known
    z = logits_RW.div_(temperature).sub_(log_total_R[:, None])
    inside, place = _inside(targets_R, z.shape[1])
    down = by_logprob_R[:, None] / temperature
    if by_entropy_R is None:
        z.exp_().mul_(-down)
    else:
        share = z.exp()
        z.add_(entropy_R[:, None]).mul_(by_entropy_R[:, None] / temperature).add_(down).mul_(share).neg_()
    return out_RW.copy_(z.scatter_add_(1, place, torch.where(inside[:, None], down, 0.0)))


def _kernels() -> Any:
    from rlhfuse.models.logprobs import tile_sums_triton  # Triton is there where CUDA is

    return tile_sums_triton


def _inside(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in the tile, [R], and its column there or any, [R, 1]."""
    return (targets >= 0) & (targets < width), targets.clamp(0, width - 1)[:, None]
