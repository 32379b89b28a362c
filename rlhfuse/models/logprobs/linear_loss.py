"""The loss of tokens straight from hidden states, its gradients made beside it: logits are multiplied once.

A chunk of rows has all its logits of this tensor rank at once. So its log-probabilities are known, and where a token's
loss depends on no other token so is the derivative: the gradients follow while the logits are there.
Letters: R rows, H hidden, V weight rows of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfuse.models.logprobs.linear_logprobs import VocabularyShard, over_ranks, slices
from rlhfuse.models.logprobs.tile_sums import add_tile, no_tile, tile_gradient
from rlhfuse.parallel.weight_gradients import add_product, product

# Of a chunk's logits in float32 and their gradient. The weight's float32 sum is read and written once a chunk, which
# at 8B takes as long as the products of 800 rows.
CHUNK_BYTES = 1 << 30
TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]  # (log-probabilities [C], entropies [C], which of R) -> a scalar


@dataclass(frozen=True)
class LinearLoss:
    """`loss` of the log-probabilities of `targets` [R] and of the entropies, of softmax(x weight^T / temperature)."""

    loss: TokenLoss
    weight_VH: Tensor
    targets_R: Tensor
    shard: VocabularyShard
    temperature: float
    entropy_graph: bool  # the loss has the entropy's gradient too
    chunk_bytes: int = CHUNK_BYTES

    def of(self, x_RH: Tensor, sum_VH: Tensor) -> Tensor:
        """The loss of all rows, a float32 scalar whose gradient must be 1: the weight's is added to `sum_VH` at once.

        The gradient of x is this rank's part of a sum over tensor ranks.
        """
        return _Gradients.apply(x_RH, sum_VH, self)  # pyright: ignore[reportReturnType]

    def chunks(self, x_RH: Tensor) -> Any:
        """Slices of nearly as many rows each; at least one."""
        rows, logit_bytes = len(x_RH), 4 + x_RH.element_size()
        count = -(-rows // max(self.chunk_bytes // (logit_bytes * max(self.shard.columns, 1)), 1))
        return slices(max(rows, 1), -(-rows // max(count, 1)) or 1)

    def add(self, x: Tensor, rows: slice, dx: Tensor, dweight: Tensor) -> Tensor:
        """The loss of one chunk; its gradients are written to `dx` and added to `dweight`."""
        columns = slice(self.shard.columns)
        weight, where = self.weight_VH[columns], self.targets_R[rows] - self.shard.start
        logits, sums = product(x, weight.t()), no_tile(len(x), x.device)
        if self.shard.columns:
            add_tile(logits, where, self.temperature, sums)
        log_total, entropy, picked = over_ranks(sums, self.shard.group)
        slopes, loss = self._slopes(picked - log_total, entropy, rows)
        if not self.shard.columns:
            dx.zero_()
            return loss
        gradient = tile_gradient(logits, where, self.temperature, log_total, entropy, *slopes, dtype=x.dtype)
        dx.copy_(product(gradient, weight))
        add_product(dweight[columns], gradient.t(), x)
        return loss

    def _slopes(self, logprobs: Tensor, entropy: Tensor, rows: slice) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
        """The loss's derivatives by log-probability and by entropy, and the loss."""
        logprobs.requires_grad_(True)
        entropy.requires_grad_(self.entropy_graph)
        with torch.enable_grad():
            loss = self.loss(logprobs, entropy, rows)
        found = torch.autograd.grad(loss, (logprobs, entropy)[: 1 + self.entropy_graph])
        slopes = [slope.contiguous() for slope in found]
        return (slopes[0], slopes[1] if self.entropy_graph else None), loss.detach()


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dweight: Tensor, work: LinearLoss) -> Tensor:
        dx = torch.empty_like(x)
        ctx.save_for_backward(dx)
        losses = [work.add(x[rows], rows, dx[rows], dweight) for rows in work.chunks(x)]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dx,) = ctx.saved_tensors
        return dx.mul_(by_loss), None, None
