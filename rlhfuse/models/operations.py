"""The tensor functions of a model that differ by device, chosen in one place.

On CPU those of cpu/invariance.py, by which a row's bits do not depend on the other rows; elsewhere torch's own,
and Triton's where torch has no fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.cpu import invariance


@dataclass(frozen=True)
class Operations:
    linear: Callable[[Tensor, Tensor], Tensor]  # x [..., K], weight [N, K] -> [..., N]
    swiglu: Callable[[Tensor], Tensor]  # [..., 2 W], gate and up side by side -> [..., W]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [..., H], weight [H], eps
    least_rows: int  # tokens that a packed batch is filled up to, on each tensor rank


def _swiglu(x: Tensor) -> Tensor:
    if x.is_cuda:
        from rlhfuse.models.gpu.swiglu import swiglu

        return swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


TORCH = Operations(F.linear, _swiglu, lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps), 1)
BATCH_INVARIANT = Operations(invariance.linear, invariance.swiglu, invariance.rms_norm, invariance.SAFE_ROWS)


def operations_for(device: torch.device) -> Operations:
    """The operations of models on this device."""
    return BATCH_INVARIANT if device.type == "cpu" else TORCH
