"""SwiGLU in one launch forward and one backward, computed in float32 and rounded once; its input alone is kept.

Letters: R rows, W the width of gate and of up, which lie side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE: Any = dict(COLUMNS=1024)  # of one program


@triton.jit
def _swiglu_kernel(x, out, width, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(x, gradient, dx, width, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    activation = gate * share
    dgate = dy * up * (share + activation * (1.0 - share))
    dup = dy * activation
    tl.store(dx + row * 2 * width + at, dgate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + row * 2 * width + width + at, dup.to(dx.dtype.element_ty), mask=inside)


def gate_rows(x: Tensor) -> Tensor:
    """silu(gate) * up [..., W] of x [..., 2 W]; without a graph. Bytes of 16-bit numbers: 6 R W."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if out.numel():
        width = out.shape[-1]
        _swiglu_kernel[out.numel() // width, triton.cdiv(width, TILE["COLUMNS"])](x, out, width, **TILE)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gate_rows(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gradient = ctx.saved_tensors[0].detach().contiguous(), gradient.contiguous()
        dx = torch.empty_like(x)
        if gradient.numel():
            width = gradient.shape[-1]
            grid = gradient.numel() // width, triton.cdiv(width, TILE["COLUMNS"])
            _swiglu_backward_kernel[grid](x, gradient, dx, width, **TILE)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up [..., W] of x [..., 2 W]; differentiable once."""
    return _SwiGLU.apply(x)  # pyright: ignore[reportReturnType]
