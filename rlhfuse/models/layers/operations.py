"""The tensor functions of a model that differ by device, chosen in one place.

On CPU those by which a row's bits do not depend on the other rows; elsewhere torch's own, and Triton's where torch has
no fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.layers.norm import exact_rms_norm, rms_norm
from rlhfuse.models.layers.swiglu import exact_swiglu, swiglu

SAFE_ROWS = 16  # the GEMM library sums in another order for fewer
SAFE_OUTPUTS = 8  # a single output is a matrix-vector product, whose order depends on the row count


@dataclass(frozen=True)
class Operations:
    linear: Callable[[Tensor, Tensor], Tensor]  # x [..., K], weight [N, K] -> [..., N]
    swiglu: Callable[[Tensor], Tensor]  # [..., 2 W], gate and up side by side -> [..., W]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [..., H], weight [H], eps
    least_rows: int  # tokens that a packed batch is filled up to, on each tensor rank


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] @ weight [N, K]^T on CPU; few rows, or one output, are filled up to a count that is safe."""
    if weight.shape[0] < SAFE_OUTPUTS:
        wide = exact_linear(x, F.pad(weight, (0, 0, 0, SAFE_OUTPUTS - weight.shape[0])))
        return wide[..., : weight.shape[0]]
    rows = x.numel() // x.shape[-1]
    if rows >= SAFE_ROWS:
        return F.linear(x, weight)
    padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, SAFE_ROWS - rows))
    return F.linear(padded, weight)[:rows].reshape(*x.shape[:-1], len(weight))


TORCH = Operations(F.linear, swiglu, rms_norm, 1)
EXACT = Operations(exact_linear, exact_swiglu, exact_rms_norm, SAFE_ROWS)


def operations_for(device: torch.device) -> Operations:
    """The operations of models on this device."""
    return EXACT if device.type == "cpu" else TORCH
