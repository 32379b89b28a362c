"""A decoder layer's kernels on CPU in float32: numba's, where a row's bits depend on that row alone (cpu/tiles.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfuse.models.attention.packed import cpu
from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.cpu.elementwise import F32
from rlhfuse.models.cpu.tiles import LANES, share_threads, shares
from rlhfuse.models.layers.norm import normalize_backward, row_norm
from rlhfuse.models.layers.swiglu import gate_rows_backward
from rlhfuse.models.stack.torch_ops import TorchOps


class CpuOps(TorchOps):
    """`TorchOps` by numba kernels; the attention kernels turn queries and keys themselves."""

    def batch(self, sequences: SequenceBorders) -> tuple[Any, ...]:
        """Arguments of the attention kernels, in their order: cos, sin, starts, bounds, scale."""
        cos, sin = self.rotary.up_to(sequences.longest)
        starts = sequences.cu_seqlens.numpy().astype(np.int64)
        lengths = np.diff(starts)  # of which follow the weights that a (sequence, group) pair has to compute
        bounds = shares(np.repeat(lengths * (lengths + LANES), self.shape.groups), share_threads())
        return cos.numpy(), sin.numpy(), starts, bounds, F32(self.shape.dim**-0.5)

    def _normed(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return row_norm(x, weight, self.eps)

    def _norm_backward(self, gradient: Tensor, x: Tensor, weight: Any, saved: Any) -> Tensor:
        threads, dx, width = share_threads(), torch.empty_like(x), x.shape[-1]
        parts = x.new_empty(threads, width, dtype=torch.float64)
        flat = [rows.view(-1, width).numpy() for rows in (x, gradient, dx)]
        normalize_backward(flat[0], weight.numpy(), saved.numpy(), flat[1], threads, flat[2], parts.numpy())
        if weight.requires_grad:
            weight.main_grad.add_(parts.sum(0).float())
        return dx

    def _turned(self, heads: Sequence[Tensor], batch: Any, back: bool = False) -> Sequence[Tensor]:
        return heads

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> tuple[Tensor, Any]:
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:2])
        share_threads()
        known = q.numpy(), k.numpy(), v.numpy(), *batch
        cpu.attend(*known, out.numpy(), log_sums.numpy())  # pyright: ignore[reportCallIssue]
        return out.view(len(out), -1), log_sums

    def attend_backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Any, batch: Any
    ) -> Sequence[Tensor]:
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        known: Any = (x.numpy() for x in (q, k, v, out.view(q.shape), saved, gradient.view(q.shape)))
        share_threads()
        cpu.attend_backward(*known, *batch, *(x.numpy() for x in gradients))  # pyright: ignore[reportCallIssue]
        return gradients

    def swiglu_backward(self, x: Tensor, gradient: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        dx = torch.empty_like(x)
        gate_rows_backward(x.numpy(), gradient.numpy(), share_threads(), dx.numpy())
        return dx, self.swiglu(x) if y is None else y

    def add_product(self, weight: Any, gradient: Tensor, x: Tensor) -> None:
        weight.main_grad.add_(gradient.t().mm(x))  # rounded twice, as ever: addmm would change the bits of runs
