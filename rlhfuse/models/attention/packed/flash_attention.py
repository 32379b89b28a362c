"""flash-attn's varlen kernel, where torch has none; the only file that imports flash_attn."""

from __future__ import annotations

from torch import Tensor

from rlhfuse.base.cuda_environment import import_obstacle
from rlhfuse.models.attention.packed.sequences import PackedShape, SequenceBorders, VarlenKernel


def obstacle(shape: PackedShape) -> str:
    """Why it cannot serve, '' if it can."""
    return shape.flash_obstacle() or import_obstacle("flash_attn", "flash-attn")


def make(shape: PackedShape) -> VarlenKernel:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  optional

    def attend(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBorders) -> Tensor:
        borders, longest = sequences.cu_seqlens, sequences.longest
        return flash_attn_varlen_func(q, k, v, borders, borders, longest, longest, causal=True)

    return attend
