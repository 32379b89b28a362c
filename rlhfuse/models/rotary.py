"""Rotary frequencies of a model, the same numbers for training, scoring and generation.

Scaling stretches them: linear by one factor, llama3 by a factor that fades in from short to long wavelengths.
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
