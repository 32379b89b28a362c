"""Attention of packed sequences, for training and scoring, rotary embedding included."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.models.attention.backends import choose_packed
from rlhfuse.models.attention.packed.cpu import packed_attention
from rlhfuse.models.attention.packed.sequences import PackedShape, SequenceBorders
from rlhfuse.models.layers.rotation import rotate_packed


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor], sequences: SequenceBorders
) -> Tensor:
    """Causal attention within each packed sequence. q [T, H, D], k and v [T, G, D]; returns [T, H, D].

    rotary: cos and sin, each [longest sequence or more, D / 2] float32, which turn q and k by their positions.
    Differentiable in q, k, v. Nothing here waits for the device.
    """
    if not q.is_cuda and q.dtype == torch.float32:
        return packed_attention(q, k, v, rotary, sequences.cu_seqlens)
    q, k = (rotate_packed(x, rotary, sequences.positions) for x in (q, k))
    return choose_packed(PackedShape(q.device, q.dtype, q.shape[-1]))(q, k, v, sequences)
