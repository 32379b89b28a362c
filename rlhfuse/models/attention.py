"""Attention in its two shapes: packed sequences for training and scoring, a block-wise cache for generation.

On CUDA with flash-attn installed all are its kernels, where `flash_obstacle` names nothing against it; elsewhere
torch's own. This is the only file that imports flash_attn; the CPU engine's kernel is cpu/paged_attention.py.
Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences, R rows, W columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.cpu.packed_attention import packed_attention
from rlhfuse.models.rotary import rotate_packed

FLASH_BLOCK = 256  # flash-attn reads a paged cache only in blocks of a multiple of this


@functools.cache  # a failed import is searched for again each time
def flash_attention() -> Any | None:
    """The flash_attn module, or None where it is not installed."""
    try:
        import flash_attn  # pyright: ignore[reportMissingImports]  optional
    except ImportError:
        return None
    return flash_attn


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


@dataclass(frozen=True, eq=False)
class PagedQueries:
    """Which queries read which cache blocks. Sequence s owns queries starts[s]:starts[s + 1], its last tokens."""

    tables: Tensor  # [S, most blocks] int32
    query_starts: Tensor  # [S + 1] int32
    key_starts: Tensor  # [S + 1] int32: running sum of the contexts
    starts: list[int]  # query_starts, on the host
    contexts: list[int]  # [S] tokens up to the last query

    @staticmethod
    def of(tables: Tensor, starts: list[int], contexts: list[int]) -> PagedQueries:
        """The same from the host's lists, copied to the device of `tables`."""
        query_starts = torch.tensor(starts, dtype=torch.int32, device=tables.device)
        key_starts = torch.tensor([0, *contexts], device=tables.device).cumsum(0).int()
        return PagedQueries(tables, query_starts, key_starts, starts, contexts)


def flash_obstacle(dtype: torch.dtype, device: torch.device, head_dim: int, block_tokens: int) -> str | None:
    """Why flash-attn cannot read such a cache; None if it can."""
    if device.type != "cuda" or flash_attention() is None:
        return "flash-attn runs on CUDA alone" if device.type != "cuda" else "flash-attn is not installed"
    if dtype == torch.float32:
        return "flash-attn computes in 16 bits, not in float32"
    if head_dim % 8 or head_dim > 256:
        return f"flash-attn takes a head_dim of multiples of 8 up to 256, not {head_dim}"
    if block_tokens % FLASH_BLOCK:
        return f"flash-attn reads blocks of a multiple of {FLASH_BLOCK} tokens, not {block_tokens}"
    return None


def _flash_for(q: Tensor, keys: Tensor) -> Any | None:
    return flash_attention() if flash_obstacle(q.dtype, q.device, q.shape[-1], keys.shape[1]) is None else None


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries) -> Tensor:
    """Attention over cache blocks with flash-attn or torch, of any mix of prefill and decode.

    q [T, H, D]; keys, values [blocks, block_tokens, G, D]; returns [T, H, D]. With torch each sequence that has
    several queries waits for the host; what a block holds past the end of its sequence has no influence.
    """
    flash = _flash_for(q, keys)
    starts, contexts = queries.starts, queries.contexts
    lengths = [b - a for a, b in zip(starts, starts[1:])]
    if flash is not None:
        runs = queries.query_starts, queries.key_starts, max(lengths), max(contexts)
        return flash.flash_attn_varlen_func(q, keys, values, *runs, causal=True, block_table=queries.tables)
    out = torch.empty_like(q)
    single = [s for s, length in enumerate(lengths) if length == 1]
    if single:
        rows = torch.tensor([starts[s] for s in single], device=q.device)
        width = -(-max(contexts[s] for s in single) // keys.shape[1])
        ends = torch.tensor([contexts[s] for s in single], device=q.device)
        out[rows] = _gathered_decode(q[rows], keys, values, queries.tables[single, :width], ends)
    for s, length in enumerate(lengths):
        if length > 1:
            start, end = starts[s], starts[s + 1]
            out[start:end] = _prefill(q[start:end], keys, values, queries.tables[s], contexts[s])
    return out


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, contexts: Tensor) -> Tensor:
    """One query for each of R sequences; nothing is read back to the host, so a CUDA graph can hold it.

    q [R, H, D]; keys, values [blocks, block_tokens, G, D]; tables [R, W] and contexts [R] int32; returns [R, H, D].
    """
    flash = _flash_for(q, keys)
    if flash is None:
        return _gathered_decode(q, keys, values, tables, contexts)
    out = flash.flash_attn_with_kvcache(
        q.unsqueeze(1), keys, values, cache_seqlens=contexts, block_table=tables, causal=True
    )
    return out.squeeze(1)


def _gathered_decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, contexts: Tensor) -> Tensor:
    rows, heads, dim = q.shape
    tokens = tables.shape[1] * keys.shape[1]
    inside = torch.arange(tokens, device=q.device)[None] < contexts[:, None]
    beyond = ~inside[:, :, None, None]
    # What lies past an end is set to zero besides being masked: a stale NaN times a weight of zero is still NaN.
    k, v = (
        x.index_select(0, tables.flatten()).view(rows, tokens, -1, dim).masked_fill_(beyond, 0).transpose(1, 2)
        for x in (keys, values)
    )
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=inside[:, None, None], enable_gqa=heads != k.shape[1]
    )
    return out.reshape(rows, heads, dim)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, context: int) -> Tensor:
    """Several queries of one sequence, the last at position context - 1. q [T, H, D]."""
    blocks = -(-context // keys.shape[1])
    k, v = (x[table[:blocks].long()].flatten(0, 1)[:context] for x in (keys, values))
    if q.shape[0] == context:
        return _dense(q, k, v)
    positions = torch.arange(context - q.shape[0], context, device=q.device)
    mask = torch.arange(context, device=q.device)[None] <= positions[:, None]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)
