"""Operations of a decoder layer, forward and backward, without autograd: the only place where devices differ.

These are in torch; their backwards differentiate the forward again. `cpu_ops` and `cuda_ops` override them by kernels.

Letters: T tokens, C hidden, H query heads and G key/value heads of this tensor rank, D head_dim, F the MLP's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.attention.backends import choose_packed
from rlhfuse.models.attention.packed.sequences import PackedShape, SequenceBorders
from rlhfuse.models.layers.operations import operations_for
from rlhfuse.models.layers.rotation import RotaryTables, rotate_packed
from rlhfuse.parallel.weight_gradients import add_product


class HeadShape(NamedTuple):
    """Attention heads of one tensor rank."""

    heads: int  # H, of queries
    groups: int  # G, of keys and values
    dim: int  # D

    @staticmethod
    def of(spec: ModelSpec, tp: int) -> HeadShape:
        """Those of one of `tp` tensor ranks."""
        return HeadShape(spec.heads // tp, spec.kv_heads // tp, spec.head_dim)


class TorchOps:
    """The kernels of one stage's layers in torch, on any device and in any dtype.

    A gradient of a weight is added to the weight's `main_grad`, float32; a frozen weight gets none.
    """

    def __init__(self, rotary: RotaryTables, shape: HeadShape, eps: float, device: torch.device) -> None:
        self.rotary, self.shape, self.eps, self.operations = rotary, shape, eps, operations_for(device)

    def batch(self, sequences: SequenceBorders) -> Any:
        """Values shared by all calls for one micro-batch, to be passed to `split`, `attend` and their backwards."""
        return sequences, self.rotary.up_to(sequences.longest)

    def norm(self, x: Tensor, delta: Tensor | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Any]:
        """(x + (delta + bias), its RMSNorm, what `norm_backward` needs), [T, C] each."""
        if delta is not None:
            x = x + (delta if bias is None else delta + bias)
        return x, *self._normed(x, weight)

    def norm_backward(self, gradient: Tensor, x: Tensor, weight: Any, saved: Any, residual: Tensor | None) -> Tensor:
        """The gradient of the norm's input x, of the `gradient` of its output, and `residual` added; [T, C] each."""
        dx = self._norm_backward(gradient, x, weight, saved)
        return dx if residual is None else residual + dx

    def _normed(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        """(the norm of each row of x [..., C], what its backward needs)."""
        return self.operations.rms_norm(x, weight, self.eps), None

    def _norm_backward(self, gradient: Tensor, x: Tensor, weight: Any, saved: Any) -> Tensor:
        dx, dweight = pulled_back(
            lambda x, weight: self.operations.rms_norm(x, weight, self.eps), (x, weight), gradient
        )
        if weight.requires_grad:
            weight.main_grad.add_(dweight)
        return dx

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] @ weight [N, K]^T + bias [N]."""
        out = self.operations.linear(x, weight)
        return out if bias is None else out + bias

    def split(self, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, batch: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """(q [T, H, D], k [T, G, D], v [T, G, D], what `join` needs) of qkv [T, G * (H / G + 2) * D].

        Of each group qkv has the queries, the key and the value; q and k are normed by the weights `norms` [D] of both,
        then turned by their positions.
        """
        q, k, v = self.heads_of(qkv)
        saved = None
        if norms is not None:
            (q_normed, q_scales), (k_normed, k_scales) = (self._normed(x, w) for x, w in zip((q, k), norms))
            saved, q, k = ((q, q_scales), (k, k_scales)), q_normed, k_normed
        q, k = self._turned((q, k), batch)
        return q, k, v, saved

    def join(self, gradients: Sequence[Tensor], saved: Any, norms: tuple[Tensor, Tensor] | None, batch: Any) -> Tensor:
        """The gradient of `split`'s qkv, of the `gradients` of its q, k and v."""
        dq, dk = self._turned(gradients[:2], batch, back=True)
        if norms is not None:
            dq, dk = (self._norm_backward(d, x, w, scales) for d, (x, scales), w in zip((dq, dk), saved, norms))
        return self.joined(dq, dk, gradients[2])

    def _turned(self, heads: Sequence[Tensor], batch: Any, back: bool = False) -> Sequence[Tensor]:
        """Queries and keys turned by their positions, where `attend` does not do it."""
        sequences, tables = batch
        return [rotate_packed(x, tables, sequences.positions, back) for x in heads]

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of q, k and v as they lie in qkv."""
        heads, groups, dim = self.shape
        grouped = qkv.view(len(qkv), groups, -1, dim)
        q = grouped[:, :, :-2].reshape(len(qkv), heads, dim).contiguous()  # one query a key head: a view
        return q, grouped[:, :, -2].contiguous(), grouped[:, :, -1].contiguous()

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `heads_of`."""
        grouped = q.view(len(q), self.shape.groups, -1, self.shape.dim)
        return torch.cat((grouped, k[:, :, None], v[:, :, None]), 2).view(len(q), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> tuple[Tensor, Any]:
        """(causal attention within each sequence [T, H * D], what `attend_backward` needs)."""
        return self._attention(q, k, v, batch).flatten(1), None

    def attend_backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Any, batch: Any
    ) -> Sequence[Tensor]:
        """Gradients of q, k and v, of that [T, H * D] of `attend`'s out."""
        return pulled_back(lambda q, k, v: self._attention(q, k, v, batch), (q, k, v), gradient.view(q.shape))

    @staticmethod
    def _attention(q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        return choose_packed(PackedShape(q.device, q.dtype, q.shape[-1]))(q, k, v, batch[0])

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up [T, F] of x [T, 2 F], gate and up side by side."""
        return self.operations.swiglu(x)

    def swiglu_backward(self, x: Tensor, gradient: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the gradient of x, of that of `swiglu`'s output y; y, which is made again where it is None)."""
        (dx,) = pulled_back(self.operations.swiglu, (x,), gradient)
        return dx, self.swiglu(x) if y is None else y

    def add_product(self, weight: Any, gradient: Tensor, x: Tensor) -> None:
        """Add gradient [T, N]^T @ x [T, K] to the weight's main_grad [N, K]."""
        add_product(weight.main_grad, gradient.t(), x)

    def add_rows(self, bias: Any, gradient: Tensor) -> None:
        """Add the rows of gradient [T, N] to the bias's main_grad [N]."""
        bias.main_grad.add_(gradient.sum(0, dtype=torch.float32))


def pulled_back(function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """Gradients of a function's inputs, of that of its output."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, gradient)
