"""Log-probabilities and entropies straight from hidden states: of the logits only a tile exists at a time.

The forward keeps each row's running maximum and sums; the backward multiplies again, tile by tile, and adds to the
weight's gradient in float32. Tiles go over vocabulary rows inside, so that each weight is visited once per chunk.
Letters: R rows, H hidden, V weight rows of this tensor rank, C rows of a chunk, W columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.models.logprobs.tile_sums import add_tile, no_tile, tile_gradient
from rlhfuse.parallel.weight_gradients import add_product, product

TILE_BYTES = 512 << 20  # of a tile of logits: itself and what its gradient is made of, 10 bytes per logit
LINE_BYTES = 128 << 20  # of a chunk's float32 gradient of hidden states, and of a tile's of weights
LOGIT_BYTES = 10


@dataclass(frozen=True)
class VocabularyShard:
    """Which tokens the weight rows of this tensor rank are; rows from `columns` on are padding and take no part."""

    start: int
    columns: int
    group: dist.ProcessGroup

    @staticmethod
    def of(weight: Tensor, vocab: int, group: dist.ProcessGroup) -> VocabularyShard:
        start = dist.get_rank(group) * len(weight)
        return VocabularyShard(start, min(max(vocab - start, 0), len(weight)), group)


@dataclass(frozen=True)
class TileLimits:
    """Most bytes at once of a tile of logits, and of each float32 sum of gradients."""

    tile: int = TILE_BYTES
    line: int = LINE_BYTES

    def chunks(self, x: Tensor) -> Iterator[slice]:
        """Rows of x [R, H] that are worked on at a time."""
        rows, hidden = x.shape
        return slices(rows, max(self.line // (4 * hidden), 1))

    def tiles(self, chunk: Tensor, columns: int) -> Iterator[slice]:
        """Columns of each tile of a chunk's logits."""
        rows, hidden = chunk.shape
        most = min(self.tile // (LOGIT_BYTES * rows), self.line // (4 * hidden))
        return slices(columns, max(most // 64 * 64, 1))


def slices(count: int, step: int) -> Iterator[slice]:
    """0 to `count`, `step` at a time."""
    return (slice(at, min(at + step, count)) for at in range(0, count, step))


def linear_logprobs(
    x_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    shard: VocabularyShard,
    temperature: float,
    entropy_graph: bool,
    limits: TileLimits | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy, [R] float32 each, of softmax(x weight^T / temperature).

    Differentiable once in x and the weight, of the entropy only with `entropy_graph`. The gradient of x is this
    rank's part of a sum over tensor ranks. A weight that has a `main_grad` gets its gradient there and no other.
    """
    # Not an input of the function, or autograd would tell Megatron's hooks of a gradient that is not there.
    owner = weight_VH if hasattr(weight_VH, "main_grad") else None
    weight = weight_VH if owner is None else weight_VH.detach()
    settings = _Settings(shard, temperature, entropy_graph, limits or TileLimits(), owner)
    return _LinearLogprobs.apply(x_RH, weight, targets_R, settings)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class _Settings:
    shard: VocabularyShard
    temperature: float
    entropy_graph: bool
    limits: TileLimits
    owner: Any  # of the weight's main_grad, looked up when there is a gradient: its memory comes and goes


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, settings: _Settings) -> Any:
        local = targets - settings.shard.start
        sums = no_tile(len(x), x.device)
        for rows in settings.limits.chunks(x):
            part = x[rows]
            for columns in settings.limits.tiles(part, settings.shard.columns):
                logits = product(part, weight[columns].t())
                add_tile(logits, local[rows] - columns.start, settings.temperature, sums[:, rows])
        log_total, entropy, picked = over_ranks(sums, settings.shard.group)
        ctx.save_for_backward(x, weight, local, log_total, entropy)
        ctx.settings = settings
        if not settings.entropy_graph:
            ctx.mark_non_differentiable(entropy)
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, local, log_total, entropy = (saved.detach() for saved in ctx.saved_tensors)
        settings: _Settings = ctx.settings
        dweight = None
        if settings.owner is not None:
            dweight = settings.owner.main_grad
        elif ctx.needs_input_grad[1]:
            dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        by_logprob, by_entropy = by_logprob.contiguous(), by_entropy.contiguous()  # a sum's gradient is an expanded one
        dx = torch.zeros_like(x)
        for rows in settings.limits.chunks(x):
            part, total = x[rows], torch.zeros(x[rows].shape, dtype=torch.float32, device=x.device)
            given = (
                log_total[rows],
                entropy[rows],
                by_logprob[rows],
                by_entropy[rows] if settings.entropy_graph else None,
            )
            for columns in settings.limits.tiles(part, settings.shard.columns):
                logits = product(part, weight[columns].t())
                where = local[rows] - columns.start
                gradient = tile_gradient(logits, where, settings.temperature, *given, x.new_empty(logits.shape))
                del logits
                add_product(total, gradient, weight[columns])
                if dweight is not None:
                    add_product(dweight[columns], gradient.t(), part)
                del gradient  # before the next tile
            dx[rows] = total
        return dx, dweight.to(weight.dtype) if settings.owner is None and dweight is not None else None, None, None


def over_ranks(sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithm of the softmax's denominator, entropy and target's logit [R] of all tensor ranks' sums [4, R]."""
    top, total, moment, picked = sums
    if dist.get_world_size(group) > 1:
        top = top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shrink = (sums[0] - top).exp()
        rest = torch.stack([total * shrink, (moment + (sums[0] - top) * total) * shrink, picked])
        dist.all_reduce(rest, group=group)
        total, moment, picked = rest
    log_total = total.log()
    return log_total + top, log_total - moment / total, picked.clone()
