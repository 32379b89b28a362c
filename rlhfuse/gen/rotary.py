"""Rotary position embedding: the tables of cosines and sines, and their use on CUDA.

Position p turns the pair (x[d], x[d + D/2]) by the angle p * theta^(-2d/D) ("rotate half", as in Hugging Face and
Megatron). Scaling stretches the frequencies: linear by one factor, llama3 by a factor that fades in from short to
long wavelengths. Knows nothing of heads' meaning or of caches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhfuse.spec import ModelSpec, RopeScaling


def rotary_tables(spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [context, head_dim / 2] float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = _scaled(1.0 / spec.rope_theta**exponents, spec.rope_scaling)
    angles = torch.outer(torch.arange(spec.context).float(), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 for wavelengths beyond original_context / low (fully stretched), 1 below original_context / high (kept).
    keep = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by the rows cos, sin [T, D/2] of its positions; computed in float32."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
