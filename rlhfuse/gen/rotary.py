"""Rotary position embedding: the tables of cosines and sines, and their use on CUDA.

Position p turns the pair (x[d], x[d + D/2]) by the angle p * theta^(-2d/D) ("rotate half", as in Hugging Face and
Megatron). Knows nothing of heads' meaning or of caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.models.rotary import rotary_frequencies
from rlhfuse.spec import ModelSpec


def rotary_tables(spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [context, head_dim / 2] float32."""
    angles = torch.outer(torch.arange(spec.context).float(), rotary_frequencies(spec))
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by the rows cos, sin [T, D/2] of its positions; computed in float32."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
