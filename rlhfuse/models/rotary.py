"""Rotary position embedding, the same numbers for training, scoring and generation.

Position p turns the pair (x[d], x[d + D/2]) by the angle p * theta^(-2d/D) ("rotate half", as in Hugging Face and
Megatron). Scaling stretches the wavelengths: linear by one factor, llama3 by one that fades in from short to long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhfuse.config.spec import ModelSpec, RopeScaling


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of head dimensions: float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    return _scaled(1.0 / spec.rope_theta**exponents, spec.rope_scaling)


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
