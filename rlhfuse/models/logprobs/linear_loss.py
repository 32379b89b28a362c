"""The loss of tokens straight from hidden states, its gradients made beside it, in the forward.

A chunk of rows has all its logits of this tensor rank at once. So its log-probabilities are known, and where a token's
loss depends on no other token so is the derivative: the gradients follow while the logits are there. Else all
log-probabilities come first, and logits are multiplied twice. Letters: R rows, H hidden, V weight rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, slices
from rlhfuse.models.logprobs.tile_sums import tile_gradient
from rlhfuse.parallel.weight_gradients import add_product, product

# A chunk's gradient of logits, with its rows in float32 and rounded. The weight's float32 sum is read and written once
# a chunk, which at 8B takes as long as the products of 800 rows.
GRADIENT_BYTES, FLOAT_BYTES = 768 << 20, 6
TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]  # (log-probabilities [C], entropies [C], which of R) -> a scalar
Slopes = Callable[[Tensor, slice], Sequence[Tensor]]  # ([both, C], which of R) -> derivatives [C] by one or by both


@dataclass(frozen=True)
class LinearLoss:
    """`loss` of log-probabilities and entropies: a sum over tokens if `by_token`, else asked once for all rows."""

    loss: TokenLoss
    logprobs: LinearLogprobs
    entropy_graph: bool = False  # the loss has the entropy's gradient too
    by_token: bool = True
    most_bytes: int = GRADIENT_BYTES

    def of(self, x_RH: Tensor, sum_VH: Tensor) -> Tensor:
        """The loss of all rows, a float32 scalar whose gradient must be 1: the weight's is added to `sum_VH` at once.

        The gradient of x is this rank's part of a sum over tensor ranks.
        """
        return _Gradients.apply(x_RH, sum_VH, self)  # pyright: ignore[reportReturnType]

    def add(self, x: Tensor, rows: slice, dx: Tensor, dweight: Tensor, slopes: Slopes) -> None:
        """The gradients of one chunk are written to `dx` and added to `dweight`.

        A gradient of logits with one slope a token is that of the log-probability: the slope, known when the whole
        chunk's are, goes with the rows of x and dx. With two it is made with both.
        """
        softmax, columns, outputs = self.logprobs, self.logprobs.shard.columns, []  # no columns: of padding alone
        weight, gradient, slope = softmax.weight_VH[:columns], x.new_empty(len(x), columns), None
        for part in softmax.parts(len(x)):
            at = slice(rows.start + part.start, rows.start + part.stop)
            logits, log_total, output = softmax.part(x[part], where := softmax.columns(at))
            outputs.append(output)
            by_logprob, by_entropy = slopes(output, at) if self.entropy_graph else (torch.ones_like(log_total), None)
            if logits is not None:
                known = log_total, output[1], by_logprob, by_entropy
                tile_gradient(logits, where, softmax.temperature, known, gradient[part])
            del logits  # before the next part
        if not self.entropy_graph:
            slope = slopes(torch.cat(outputs, dim=1), rows)[0][:, None]
        if not columns:
            dx.zero_()
            return
        back = product(gradient, weight)
        dx.copy_(back if slope is None else back.mul_(slope))
        del back  # before x is scaled
        add_product(dweight[:columns], gradient.t(), x if slope is None else (x * slope).to(x.dtype))

    def slopes(self, losses: list[Tensor], outputs_2R: Tensor, rows: slice) -> Sequence[Tensor]:
        """Derivatives of the loss, which `losses` gets, by log-probability and, with `entropy_graph`, by entropy."""
        logprobs, entropy = (output.detach() for output in outputs_2R)
        leaves = [logprobs.requires_grad_(), entropy.requires_grad_(self.entropy_graph)]
        with torch.enable_grad():
            loss = self.loss(logprobs, entropy, rows)
        losses.append(loss.detach())
        found = torch.autograd.grad(loss, leaves[: 1 + self.entropy_graph])
        return [slope.contiguous() for slope in found]  # a sum's is an expanded one


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dweight: Tensor, work: LinearLoss) -> Tensor:
        losses: list[Tensor] = []
        slopes: Slopes = partial(work.slopes, losses)
        if not work.by_token:
            known = slopes(work.logprobs.of(x), slice(None))
            slopes = lambda _, rows: [slope[rows] for slope in known]  # noqa: E731
        dx = torch.empty_like(x)
        ctx.save_for_backward(dx)
        row_bytes = x.element_size() * len(work.logprobs.weight_VH) + FLOAT_BYTES * x.shape[1]
        for rows in slices(len(x), row_bytes, work.most_bytes):
            work.add(x[rows], rows, dx[rows], dweight, slopes)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dx,) = ctx.saved_tensors
        return dx.mul_(by_loss), None, None
