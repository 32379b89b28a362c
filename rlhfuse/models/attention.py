"""Attention in its two shapes: packed sequences for training and scoring, a block-wise cache for generation.

    varlen_attention   q, k, v of whole sequences lie one after another; with autograd
    paged_attention    queries against keys and values in cache blocks; no autograd

On CUDA with flash-attn installed both are its kernels. Without it each sequence goes through torch's own
attention by itself, and so the result of a sequence never depends on its neighbours. The engine on CPU uses the
numba kernel of paged_cpu.py instead of the cached form. This is the only file that imports flash_attn. Knows
nothing of models or of scheduling.

Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_BLOCK = 256  # flash-attn reads a paged cache only in blocks of a multiple of this


def flash_attention() -> Any | None:
    """The flash_attn module, or None where it is not installed."""
    try:
        import flash_attn
    except ImportError:
        return None
    return flash_attn


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool = True
) -> Tensor:
    """Attention within each packed sequence. q [T, H, D], k and v [T, G, D]; returns [T, H, D].

    cu_seqlens [S + 1] int32: sequence s is rows cu_seqlens[s]:cu_seqlens[s + 1]. Differentiable in q, k, v.
    """
    flash = flash_attention() if q.is_cuda and q.dtype != torch.float32 else None
    if flash is not None:
        return flash.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=causal)
    bounds = cu_seqlens.tolist()
    pieces = [_dense(q[a:b], k[a:b], v[a:b], causal) for a, b in zip(bounds, bounds[1:]) if b > a]
    return torch.cat(pieces) if pieces else torch.empty_like(q)


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of one sequence, [T, heads, D] in and out."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, query_starts: list[int], contexts: list[int]
) -> Tensor:
    """Attention over cache blocks with torch or flash-attn. q [T, H, D]; keys, values [blocks, block_tokens, G, D].

    tables [S, most blocks] int32 on q's device; sequence s owns queries query_starts[s]:query_starts[s + 1], the
    last of them at position contexts[s] - 1. Returns [T, H, D].
    """
    flash = flash_attention() if q.is_cuda and q.dtype != torch.float32 else None
    if flash is not None and keys.shape[1] % FLASH_BLOCK == 0:
        return _flash_paged(flash, q, keys, values, tables, query_starts, contexts)
    lengths = [b - a for a, b in zip(query_starts, query_starts[1:])]
    out = torch.empty_like(q)
    decode = [s for s, length in enumerate(lengths) if length == 1]
    if decode:
        rows = torch.tensor([query_starts[s] for s in decode], device=q.device)
        out[rows] = _decode(q[rows], keys, values, tables[decode], [contexts[s] for s in decode])
    for s, length in enumerate(lengths):
        if length > 1:
            start, end = query_starts[s], query_starts[s + 1]
            out[start:end] = _prefill(q[start:end], keys, values, tables[s], contexts[s])
    return out


def _flash_paged(flash, q, keys, values, tables, query_starts, contexts) -> Tensor:
    starts = torch.tensor(query_starts, dtype=torch.int32, device=q.device)
    ends = torch.tensor([0] + contexts, dtype=torch.int32, device=q.device).cumsum(0, dtype=torch.int32)
    longest = max(b - a for a, b in zip(query_starts, query_starts[1:]))
    return flash.flash_attn_varlen_func(
        q, keys, values, starts, ends, longest, max(contexts), causal=True, block_table=tables
    )


def _decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, contexts: list[int]) -> Tensor:
    """One query per sequence: gather the blocks, mask what lies past each end. q [S, H, D]."""
    sequences, heads, dim = q.shape
    blocks = -(-max(contexts) // keys.shape[1])
    k, v = (x[tables[:, :blocks].long()].flatten(1, 2).transpose(1, 2) for x in (keys, values))  # [S, G, tokens, D]
    ends = torch.tensor(contexts, device=q.device)
    mask = torch.arange(k.shape[2], device=q.device)[None] < ends[:, None]
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=mask[:, None, None], enable_gqa=heads != k.shape[1]
    )
    return out.reshape(sequences, heads, dim)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, context: int) -> Tensor:
    """Several queries of one sequence, the last at position context - 1. q [T, H, D]."""
    blocks = -(-context // keys.shape[1])
    k, v = (x[table[:blocks].long()].flatten(0, 1)[:context] for x in (keys, values))
    if q.shape[0] == context:
        return _dense(q, k, v, causal=True)
    positions = torch.arange(context - q.shape[0], context, device=q.device)
    mask = torch.arange(context, device=q.device)[None] <= positions[:, None]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)
