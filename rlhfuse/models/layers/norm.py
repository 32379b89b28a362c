"""RMSNorm: torch's, and on CPU one by which a row's bits depend on that row alone.

In float32 the CPU's is numba kernels, forward and backward, one pass over the rows each; the weight's gradient adds up
all rows. Both are x / rms(x) * weight over the last dimension, of x [..., H] and weight [H].
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange
from torch import Tensor

from rlhfuse.models.cpu.elementwise import F32
from rlhfuse.models.cpu.tiles import LANES, share_threads


@njit(forceinline=True)
def _dot(a, b, lanes):
    """Sum of a * b, LANES sums side by side."""
    whole = a.shape[0] // LANES * LANES
    for j in range(LANES):
        lanes[j] = F32(0.0)
    for start in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] += a[start + j] * b[start + j]
    for j in range(a.shape[0] - whole):
        lanes[j] += a[whole + j] * b[whole + j]
    for half in (8, 4, 2, 1):
        for j in range(half):
            lanes[j] += lanes[half + j]
    return lanes[0]


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def normalize(x, weight, eps, threads, scales, out):
    """out [R, H] = x * scale * weight with scale [R] = 1 / rms(x)."""
    rows, width = x.shape
    for part in prange(threads):
        lanes = np.empty(LANES, np.float32)
        for r in range(rows * part // threads, rows * (part + 1) // threads):
            scale = F32(1.0) / np.sqrt(_dot(x[r], x[r], lanes) / F32(width) + eps)
            scales[r] = scale
            for f in range(width):
                out[r, f] = x[r, f] * scale * weight[f]


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def normalize_backward(x, weight, scales, gradient, threads, dx, dweight):
    """Gradients of x [R, H] and, in a part for each thread, of weight: dweight [threads, H] float64."""
    rows, width = x.shape
    for part in prange(threads):
        lanes, weighted = np.empty(LANES, np.float32), np.empty(width, np.float32)
        dweight[part] = 0.0
        for r in range(rows * part // threads, rows * (part + 1) // threads):
            scale = scales[r]
            for f in range(width):
                dweight[part, f] += gradient[r, f] * x[r, f] * scale
                weighted[f] = gradient[r, f] * weight[f]
            along = _dot(weighted, x[r], lanes) * scale * scale / F32(width)
            for f in range(width):
                dx[r, f] = (weighted[f] - x[r, f] * along) * scale


def row_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * weight, 1 / rms(x) of each row), float32."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out, scales = torch.empty_like(rows), rows.new_empty(len(rows))
    normalize(rows.numpy(), weight.numpy(), F32(eps), share_threads(), scales.numpy(), out.numpy())
    return out.view(x.shape), scales


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Torch's own."""
    return F.rms_norm(x, weight.shape, weight, eps)


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The CPU's, computed in float32, as Hugging Face Llama does; of float32 without a graph."""
    if x.dtype == weight.dtype == torch.float32:
        return row_norm(x, weight, eps)[0]
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
