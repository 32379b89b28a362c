"""Attention of packed sequences, for training and scoring; that of generation is paged_attention.py.

On CUDA with flash-attn installed it is its kernel, elsewhere torch's. This is the only file that imports flash_attn.
Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences.
"""

from __future__ import annotations

import functools
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.cpu.packed_attention import packed_attention
from rlhfuse.models.rotary import rotate_packed


@functools.cache  # a failed import is searched for again each time
def import_flash_attention() -> tuple[Any | None, str | None]:
    """The flash_attn module, or None and why not."""
    try:
        import flash_attn  # pyright: ignore[reportMissingImports]  optional
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "flash_attn"
        return None, "flash-attn is not installed" if absent else f"flash-attn cannot be imported: {error}"
    return flash_attn, None


def flash_attention() -> Any | None:
    """The flash_attn module, or None where it is not installed."""
    return import_flash_attention()[0]


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Causal attention within each packed sequence. q [T, H, D], k and v [T, G, D]; returns [T, H, D].

    rotary: cos and sin, each [`max_seqlen` or more, D / 2] float32, which turn q and k by their positions.
    cu_seqlens [S + 1] int32: sequence s is rows cu_seqlens[s]:cu_seqlens[s + 1]. Differentiable in q, k, v.
    """
    if not q.is_cuda and q.dtype == torch.float32:
        return packed_attention(q, k, v, rotary, cu_seqlens)
    tokens = len(q)
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=tokens)
    positions = torch.arange(tokens, device=q.device) - starts
    q, k = (rotate_packed(x, rotary, positions) for x in (q, k))
    flash = flash_attention() if q.is_cuda and q.dtype != torch.float32 else None
    if flash is not None:
        return flash.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    # Neighbours of one length, often the samples of one prompt that were cut, are one batch: same bits, fewer calls.
    runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths) if length]
    # Split and not sliced: the gradient of one split is one cat, that of each slice a whole tensor of zeros.
    parts = zip(*(x.split([length * count for length, count in runs]) for x in (q, k, v)))
    pieces = [_dense(*part, sequences=count) for part, (_, count) in zip(parts, runs)]
    return torch.cat(pieces) if pieces else torch.empty_like(q)


def _dense(q: Tensor, k: Tensor, v: Tensor, sequences: int = 1) -> Tensor:
    """Attention of so many sequences of one length that lie one after another, [T, heads, D] in and out."""
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
