"""SwiGLU of rows on CPU in float32, forward and backward, as numba kernels: a row's bits depend on that row alone.

numba's own model of errors would look at every divisor, and the loops would not be vectorised: several times slower.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import njit, prange
from torch import Tensor

from rlhfuse.models.cpu.elementwise import F32, exp32
from rlhfuse.models.cpu.tiles import share_threads


@njit(forceinline=True, error_model="numpy")
def _sigmoid(x):
    return F32(1.0) / (F32(1.0) + exp32(min(-x, F32(88.0))))


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def gate_rows(x, threads, out):
    """out [R, W] = silu(x[:, :W]) * x[:, W:]."""
    rows, width = out.shape
    for part in prange(threads):
        for r in range(rows * part // threads, rows * (part + 1) // threads):
            gate, up, row = x[r, :width], x[r, width:], out[r]
            for f in range(width):
                row[f] = gate[f] * _sigmoid(gate[f]) * up[f]


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def gate_rows_backward(x, gradient, threads, dx):
    """dx [R, 2 W] of the `gradient` [R, W] of what `gate_rows` gave."""
    rows, width = gradient.shape
    for part in prange(threads):
        for r in range(rows * part // threads, rows * (part + 1) // threads):
            gate, up, row = x[r, :width], x[r, width:], gradient[r]
            dgate, dup = dx[r, :width], dx[r, width:]
            for f in range(width):
                sigmoid = _sigmoid(gate[f])
                activation = gate[f] * sigmoid
                dup[f] = row[f] * activation
                dgate[f] = row[f] * up[f] * (sigmoid + activation * (F32(1.0) - sigmoid))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        out = rows.new_empty(len(rows), x.shape[-1] // 2)
        gate_rows(rows.numpy(), share_threads(), out.numpy())
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = ctx.saved_tensors[0].detach()
        dx = torch.empty_like(rows)
        flat = gradient.reshape(len(rows), -1).contiguous()
        gate_rows_backward(rows.numpy(), flat.numpy(), share_threads(), dx.numpy())
        return dx.view(*gradient.shape[:-1], -1)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up [..., W] of x [..., 2 W] float32, gate and up side by side; differentiable once."""
    return _SwiGLU.apply(x)  # pyright: ignore[reportReturnType]
