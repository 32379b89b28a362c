"""The loss of tokens straight from hidden states, its gradients made beside it: logits are multiplied once.

A chunk of rows has all its logits of this tensor rank at once. So its log-probabilities are known, and where a token's
loss depends on no other token so is the derivative: the gradients follow while the logits are there.
Letters: R rows, H hidden, V weight rows of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfuse.models.logprobs.linear_logprobs import VocabularyShard, over_ranks, slices
from rlhfuse.models.logprobs.tile_sums import add_tile, no_tile, tile_gradient
from rlhfuse.parallel.weight_gradients import add_product, product

# Of logits in float32, and of their gradient. The weight's float32 sum is read and written once a chunk of gradients,
# which at 8B takes as long as the products of 800 rows.
LOGITS_BYTES, GRADIENT_BYTES = 256 << 20, 768 << 20
FLOAT_BYTES = 6  # of what goes with a gradient: a row in float32, and rounded
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
    limits: tuple[int, int] = (LOGITS_BYTES, GRADIENT_BYTES)

    def of(self, x_RH: Tensor, sum_VH: Tensor) -> Tensor:
        """The loss of all rows, a float32 scalar whose gradient must be 1: the weight's is added to `sum_VH` at once.

        The gradient of x is this rank's part of a sum over tensor ranks.
        """
        return _Gradients.apply(x_RH, sum_VH, self)  # pyright: ignore[reportReturnType]

    def slices(self, rows: int, row_bytes: int, most_bytes: int) -> Iterator[slice]:
        """Slices of nearly as many rows each, at least one; the same on all tensor ranks, which meet in each."""
        count = -(-max(rows, 1) // max(most_bytes // row_bytes, 1))
        return slices(max(rows, 1), -(-max(rows, 1) // count))

    def add(self, x: Tensor, rows: slice, dx: Tensor, dweight: Tensor) -> Tensor:
        """The loss of one chunk; its gradients are written to `dx` and added to `dweight`.

        A gradient of logits with one slope a token is that of the log-probability: the slope, known when the whole
        chunk's are, goes with the rows of x and dx. With two it is made with both.
        """
        columns, temperature = self.shard.columns, self.temperature  # no columns: of padding alone
        weight, gradient = self.weight_VH[:columns], x.new_empty(len(x), columns)
        outputs, losses = [], []
        for part in self.slices(len(x), 4 * len(self.weight_VH), self.limits[0]):
            where, sums = self.targets_R[rows][part] - self.shard.start, no_tile(len(x[part]), x.device)
            logits = product(x[part], weight.t()) if columns else None
            if logits is not None:
                add_tile(logits, where, temperature, sums)
            log_total, entropy, picked = over_ranks(sums, self.shard.group)
            outputs.append(torch.stack([picked - log_total, entropy]))
            by_logprob, by_entropy = torch.ones_like(entropy), None
            if self.entropy_graph:
                at = slice(rows.start + part.start, rows.start + part.stop)
                loss, by_logprob, by_entropy = self._slopes(outputs[-1], at)
                losses.append(loss)
            if logits is not None:
                given = log_total, entropy, by_logprob, by_entropy
                tile_gradient(logits, where, temperature, *given, gradient[part])
            del logits  # before the next part
        slope = None
        if not self.entropy_graph:
            loss, slope, _ = self._slopes(torch.cat(outputs, dim=1), rows)
            losses.append(loss)
        if not columns:
            dx.zero_()
            return torch.stack(losses).sum()
        back = product(gradient, weight)
        dx.copy_(back if slope is None else back.mul_(slope[:, None]))
        del back  # before x is scaled
        x = x if slope is None else (x * slope[:, None]).to(x.dtype)
        add_product(dweight[:columns], gradient.t(), x)
        return torch.stack(losses).sum()

    def _slopes(self, outputs_2R: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss, and its derivatives by log-probability and, with `entropy_graph`, by entropy."""
        logprobs, entropy = (output.detach() for output in outputs_2R)
        leaves = [logprobs.requires_grad_(), entropy.requires_grad_(self.entropy_graph)]
        with torch.enable_grad():
            loss = self.loss(logprobs, entropy, rows)
        found = torch.autograd.grad(loss, leaves[: 1 + self.entropy_graph])
        by_logprob, *by_entropy = (slope.contiguous() for slope in found)  # a sum's is an expanded one
        return loss.detach(), by_logprob, by_entropy[0] if by_entropy else None


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dweight: Tensor, work: LinearLoss) -> Tensor:
        dx = torch.empty_like(x)
        ctx.save_for_backward(dx)
        row_bytes = x.element_size() * len(work.weight_VH) + FLOAT_BYTES * x.shape[1]
        chunks = work.slices(len(x), row_bytes, work.limits[1])
        losses = [work.add(x[rows], rows, dx[rows], dweight) for rows in chunks]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dx,) = ctx.saved_tensors
        return dx.mul_(by_loss), None, None
