"""Rotary position embedding: the tables of cosines and sines, and their use on CUDA.

Position p turns the pair (x[d], x[d + D/2]) by the angle p * theta^(-2d/D) ("rotate half", as in Hugging Face and
Megatron). Knows nothing of heads' meaning or of caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.rotary import rotary_frequencies


def rotary_tables(spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [context, head_dim / 2] float32."""
    angles = torch.outer(torch.arange(spec.context).float(), rotary_frequencies(spec))
    return angles.cos().to(device), angles.sin().to(device)


def signed_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for `rotate`, each [context, D]: both halves side by side, the first half of sin negative."""
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] turned by rows of `signed_tables` that broadcast to it; float32, in three kernels."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)
