"""SwiGLU: torch's, and on CPU one by which a row's bits depend on that row alone.

In float32 the CPU's is numba kernels, forward and backward, with numpy's model of errors (elementwise.py says why).
All take x [..., 2 W], gate and up side by side, and give silu(gate) * up [..., W].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from numba import njit, prange
from torch import Tensor

from rlhfuse.models.cpu.elementwise import F32, sigmoid32
from rlhfuse.models.cpu.tiles import share_threads

SAFE_WIDTH = 32  # exp of the last elements of a buffer is computed by other code than the rest


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def gate_rows(x, threads, out):
    """out [R, W] = silu(x[:, :W]) * x[:, W:]."""
    rows, width = out.shape
    for part in prange(threads):
        for r in range(rows * part // threads, rows * (part + 1) // threads):
            gate, up, row = x[r, :width], x[r, width:], out[r]
            for f in range(width):
                row[f] = gate[f] * sigmoid32(gate[f]) * up[f]


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def gate_rows_backward(x, gradient, threads, dx):
    """dx [R, 2 W] of the `gradient` [R, W] of what `gate_rows` gave."""
    rows, width = gradient.shape
    for part in prange(threads):
        for r in range(rows * part // threads, rows * (part + 1) // threads):
            gate, up, row = x[r, :width], x[r, width:], gradient[r]
            dgate, dup = dx[r, :width], dx[r, width:]
            for f in range(width):
                sigmoid = sigmoid32(gate[f])
                activation = gate[f] * sigmoid
                dup[f] = row[f] * activation
                dgate[f] = row[f] * up[f] * (sigmoid + activation * (F32(1.0) - sigmoid))


def swiglu(x: Tensor) -> Tensor:
    """Torch's."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def exact_swiglu(x: Tensor) -> Tensor:
    """The CPU's; in float32 without a graph."""
    if x.dtype == torch.float32:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(len(rows), x.shape[-1] // 2)
        gate_rows(rows.numpy(), share_threads(), out.numpy())
        return out.view(*x.shape[:-1], -1)
    gate, up = x.chunk(2, dim=-1)
    return _silu(gate) * up


def _silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), [..., W]."""
    spare = -x.shape[-1] % SAFE_WIDTH
    if spare:
        return F.silu(F.pad(x, (0, spare)))[..., : x.shape[-1]]
    return F.silu(x.contiguous())
