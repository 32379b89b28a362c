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

from rlhfuse.models.layers.linear import SAFE_ROWS, exact_linear
from rlhfuse.models.layers.norm import exact_rms_norm, rms_norm
from rlhfuse.models.layers.swiglu import exact_swiglu, swiglu


@dataclass(frozen=True)
class Operations:
    linear: Callable[[Tensor, Tensor], Tensor]  # x [..., K], weight [N, K] -> [..., N]
    swiglu: Callable[[Tensor], Tensor]  # [..., 2 W], gate and up side by side -> [..., W]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [..., H], weight [H], eps
    least_rows: int  # tokens that a packed batch is filled up to, on each tensor rank


TORCH = Operations(F.linear, swiglu, rms_norm, 1)
EXACT = Operations(exact_linear, exact_swiglu, exact_rms_norm, SAFE_ROWS)


def operations_for(device: torch.device) -> Operations:
    """The operations of models on this device."""
    return EXACT if device.type == "cpu" else TORCH
