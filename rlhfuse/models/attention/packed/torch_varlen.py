"""Torch's own varlen kernel, of the newest flash-attention that it was built with."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from rlhfuse.models.attention.packed.sequences import PackedShape, SequenceBorders, VarlenKernel


def obstacle(shape: PackedShape) -> str:
    """Why it cannot serve, '' if it can."""
    if wrong := shape.flash_obstacle():
        return wrong
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401  since torch 2.10
    except ImportError as error:
        return f"torch {torch.__version__} lacks it: {error}"
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0"
    return ""


def make(shape: PackedShape) -> VarlenKernel:
    from torch.nn.attention.varlen import varlen_attn

    varlen: Any = varlen_attn
    # Fewer key heads than query heads need this word since torch 2.12.
    shared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBorders) -> Tensor:
        borders, longest = sequences.cu_seqlens, sequences.longest
        return varlen(q, k, v, borders, borders, longest, longest, window_size=(-1, 0), **shared)

    return attend
