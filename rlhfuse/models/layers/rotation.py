"""Rotary position embedding, the same numbers for training, scoring and generation.

Position p turns the pair (x[d], x[d + D/2]) by the angle p * theta^(-2d/D) ("rotate half", as in Hugging Face and
Megatron). Scaling stretches the wavelengths: linear by one factor, llama3 by one that fades in from short to long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhfuse.base.power_of_two import table_rows
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


class RotaryTables:
    """cos and sin of a model's angles, as far as its sequences have been long; its layers share them."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._tables = torch.empty(0, 0), torch.empty(0, 0)

    def up_to(self, length: int) -> tuple[Tensor, Tensor]:
        """Each [`length` or more, head_dim / 2] float32."""
        if length > len(self._tables[0]):
            angles = torch.outer(torch.arange(table_rows(length)).float(), rotary_frequencies(self._spec))
            self._tables = angles.cos().to(self._device), angles.sin().to(self._device)
        return self._tables


def rotate_packed(x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, back: bool = False) -> Tensor:
    """x [T, heads, D] turned by the positions [T] of its tokens, or turned `back`, which is the gradient.

    Angles and products are float32 whatever x is, and the result is rounded once, as the engine does it.
    """
    cos, sin = (table[positions][:, None] for table in tables)
    first, second = x.float().chunk(2, dim=-1)
    if back:
        sin = -sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
