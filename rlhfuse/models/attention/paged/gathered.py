"""Attention that gathers keys and values and leaves the rest to torch: it runs everywhere, and slowly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.attention.paged.cache import Attend, PagedQueries


class GatheredAttention:
    """In mixed steps each sequence that has several queries is a call of its own."""

    def decode(self, tables: Tensor, contexts: Tensor) -> Attend:
        return lambda q, keys, values: _gathered_decode(q, keys, values, tables, contexts)

    def mixed(self, queries: PagedQueries) -> Attend:
        return lambda q, keys, values: _gathered_mixed(q, keys, values, queries)


def _gathered_mixed(q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries) -> Tensor:
    out, lengths = torch.empty_like(q), queries.lengths
    starts, contexts = queries.starts, queries.contexts
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
    whole = q.shape[0] == context
    positions = torch.arange(context - q.shape[0], context, device=q.device)
    mask = None if whole else torch.arange(context, device=q.device)[None] <= positions[:, None]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=shared)
    return out.squeeze(0).transpose(0, 1)
