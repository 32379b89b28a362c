"""Packed sequences and where they begin; what a kernel of packed attention is.

Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBorders:
    """Packed sequences of T tokens: sequence s is rows borders[s]:borders[s + 1]."""

    cu_seqlens: Tensor  # [S + 1] int32: the borders, on the device
    positions: Tensor  # [T] int64: of each token in its sequence
    borders: tuple[int, ...]  # on the host
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> SequenceBorders:
        borders = (0, *accumulate(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        there = torch.tensor(borders, dtype=torch.int32).to(device), positions.to(device)
        return SequenceBorders(*there, borders, max(lengths))


# q [T, H, D], k and v [T, G, D], turned by their positions -> [T, H, D]: causal within each sequence, differentiable
VarlenKernel = Callable[[Tensor, Tensor, Tensor, SequenceBorders], Tensor]


@dataclass(frozen=True)
class PackedShape:
    """What kernels must be able to compute."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int

    def flash_obstacle(self) -> str:
        """Why no flash kernel computes such heads here, '' if one may."""
        if self.device.type != "cuda":
            return "it runs on CUDA alone"
        if self.dtype == torch.float32:
            return "it computes in 16 bits, not in float32"
        if self.head_dim % 8 or self.head_dim > 256:
            return f"it takes a head_dim of multiples of 8 up to 256, not {self.head_dim}"
        if torch.cuda.get_device_capability(self.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0"
        return ""
