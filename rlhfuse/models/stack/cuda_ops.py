"""A decoder layer's kernels on CUDA: cuBLAS, torch's flash-attention called straight, and Triton's by handles.

Forwards are the engine's kernels. A layer is nine launches forward; backward 16 and those of flash-attention's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.attention.packed.sequences import PackedShape
from rlhfuse.models.layers.decode_layer_triton import (
    COLUMNS,
    add_norm_kernel,
    heads_tile,
    norm_tile,
    place_heads_kernel,
    swiglu_kernel,
)
from rlhfuse.models.layers.rotation import RotaryTables
from rlhfuse.models.stack.backward_kernels import (
    add_parts_kernel,
    join_kernel,
    norm_backward_kernel,
    swiglu_backward_kernel,
)
from rlhfuse.models.stack.handle import Handle
from rlhfuse.models.stack.torch_ops import HeadShape, TorchOps

FLASH = torch.ops.aten._flash_attention_forward.default
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward.default
CAUSAL: Any = dict(window_size_left=-1, window_size_right=0)
PROGRAMS = 264  # of a gradient of weights in partial sums: two for each multiprocessor of an H100
SUMMED = dict(ROWS=32, COLUMNS=64)  # of partial sums, a tile


class CudaOps(TorchOps):
    """`TorchOps` whose attention alone is torch's where flash-attention cannot serve."""

    def __init__(self, rotary: RotaryTables, shape: HeadShape, eps: float, device: torch.device) -> None:
        super().__init__(rotary, shape, eps, device)
        built_in = torch.backends.cuda.is_flash_attention_available()
        self._flash = built_in and not PackedShape(device, torch.bfloat16, shape.dim).flash_obstacle()
        self._dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)  # unread
        tile = heads_tile(shape.heads // shape.groups, shape.dim, shape.groups)
        self._norms = functools.cache(
            lambda size, delta, bias: Handle(add_norm_kernel, 4, DELTA=delta, BIAS=bias, SCALES=True, **norm_tile(size))
        )
        self._norms_back = functools.cache(
            lambda size, residual: Handle(
                norm_backward_kernel, 3, RESIDUAL=residual, **norm_tile(size, columns=256, most=16)
            )
        )
        self._sums = functools.cache(lambda size: Handle(add_parts_kernel, 1, size=size, **SUMMED))
        self._split = functools.cache(lambda norm: Handle(place_heads_kernel, 3, NORM=norm, SLOTS=False, **tile))
        self._join = functools.cache(lambda norm: Handle(join_kernel, 3, NORM=norm, **tile))
        self._gates = functools.cache(lambda width: Handle(swiglu_kernel, 1, width=width, COLUMNS=COLUMNS))
        self._gates_back = functools.cache(
            lambda width, again: Handle(swiglu_backward_kernel, 2, width=width, AGAIN=again, COLUMNS=COLUMNS)
        )

    linear = staticmethod(F.linear)  # pyright: ignore[reportAssignmentType]  without a call of ours around it

    def norm(self, x: Tensor, delta: Tensor | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows, size = x.shape
        out, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        total = x if delta is None else torch.empty_like(x)
        if rows:
            handle = self._norms(size, delta is not None, bias is not None)
            some, also = x if delta is None else delta, x if bias is None else bias
            handle(rows, 1, x, some, also, weight, total, out, scales, self.eps)
        return total, out, scales

    def norm_backward(self, gradient: Tensor, x: Tensor, weight: Any, saved: Any, residual: Tensor | None) -> Tensor:
        rows, size = x.shape
        dx, count = torch.empty_like(x), min(rows, PROGRAMS)
        if rows:
            parts = torch.empty(count, size, dtype=torch.float32, device=x.device)
            share = rows, -(-rows // count)
            handle, added = self._norms_back(size, residual is not None), x if residual is None else residual
            handle(count, 1, x, weight, added, gradient, saved, dx, parts, *share)
            self._add_parts(weight, parts)
        return dx

    def _add_parts(self, weight: Any, parts: Tensor) -> None:
        if weight.requires_grad:
            count, size = parts.shape
            self._sums(size)(-(-size // SUMMED["COLUMNS"]), 1, parts, weight.main_grad, count)

    def split(self, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, batch: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        (heads, groups, dim), rows = self.shape, len(qkv)
        like: Any = dict(dtype=qkv.dtype, device=qkv.device)
        q, k = torch.empty(rows, heads, dim, **like), torch.empty(rows, groups, dim, **like)
        v = torch.empty_like(k)
        if rows:
            places = batch[0].positions, batch[0].positions, q, k, v  # the second is not read
            self._split(norms is not None)(rows, groups, qkv, *(norms or (qkv, qkv)), *batch[1], *places, self.eps)
        return q, k, v, None if norms is None else qkv

    def join(self, gradients: Sequence[Tensor], saved: Any, norms: tuple[Tensor, Tensor] | None, batch: Any) -> Tensor:
        (heads, groups, dim), (dq, dk, dv), rows = self.shape, gradients, len(gradients[0])
        out = parts = torch.empty(rows, (heads + 2 * groups) * dim, dtype=dq.dtype, device=dq.device)
        if not rows:
            return out
        if norms is None:
            count, given = rows, (dq, dq, dq)  # not read
        else:
            count, given = min(rows, -(-4 * PROGRAMS // groups)), (saved, *norms)
            parts = torch.empty(2, count * groups, dim, dtype=torch.float32, device=dq.device)
        places = batch[0].positions, out, parts
        share = rows, -(-rows // count)
        self._join(norms is not None)(count, groups, *given, dq, dk, dv, *batch[1], *places, self.eps, *share)
        if norms is not None:
            self._add_parts(norms[0], parts[0])
            self._add_parts(norms[1], parts[1])
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> tuple[Tensor, Any]:
        if not self._flash or q.dtype is torch.float32:
            return super().attend(q, k, v, batch)
        at, longest = batch[0].cu_seqlens, batch[0].longest
        out, log_sums, *_ = FLASH(q, k, v, at, at, longest, longest, 0.0, True, False, **CAUSAL)
        return out.view(len(out), -1), log_sums

    def attend_backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Any, batch: Any
    ) -> Sequence[Tensor]:
        if saved is None:  # torch's; `join` takes rows that follow one another
            return [x.contiguous() for x in super().attend_backward(gradient, q, k, v, out, saved, batch)]
        at, longest, shape = batch[0].cu_seqlens, batch[0].longest, q.shape
        known = gradient.view(shape), q, k, v, out.view(shape), saved, at, at, longest, longest
        return FLASH_BACKWARD(*known, 0.0, True, *self._dropout, **CAUSAL)

    def swiglu(self, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        if rows:
            self._gates(width)(rows, -(-width // COLUMNS), x, out)
        return out

    def swiglu_backward(self, x: Tensor, gradient: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        (rows, width), again = gradient.shape, y is None
        dx = torch.empty_like(x)
        y = torch.empty_like(gradient) if y is None else y
        if rows:
            self._gates_back(width, again)(rows, -(-width // COLUMNS), x, gradient, dx, y)
        return dx, y

    def add_product(self, weight: Any, gradient: Tensor, x: Tensor) -> None:
        if x.dtype is torch.float32:
            return super().add_product(weight, gradient, x)
        torch.addmm(weight.main_grad, gradient.t(), x, out_dtype=torch.float32, out=weight.main_grad)
