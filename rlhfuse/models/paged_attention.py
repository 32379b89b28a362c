"""Attention over cache blocks for generation: the kernels there are, and the choice among them by name.

    flashinfer   XQA and paged prefill, on Hopper and later        triton   kernels of our own, any block
    flash_attn   flash-attn 2, blocks of 256 tokens                torch    gathers the cache: slow, runs everywhere
Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences, R rows, W columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.models.attention import import_flash_attention
from rlhfuse.models.gpu.flashinfer_attention import FlashInferAttention, flashinfer_obstacle

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q [T, H, D], one layer's keys, its values) -> [T, H, D]
FLASH_BLOCK = 256  # flash-attn reads a paged cache only in blocks of a multiple of this


@dataclass(frozen=True)
class CacheShape:
    """What kernels must be able to read: keys and values [blocks, block_tokens, G, D] of one rank."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    most_sequences: int  # of a step


@dataclass(frozen=True, eq=False)
class PagedQueries:
    """Which queries read which cache blocks. Sequence s owns queries starts[s]:starts[s + 1], its last tokens."""

    tables: Tensor  # [S, most blocks] int32
    query_starts: Tensor  # [S + 1] int32
    contexts_there: Tensor  # [S] int32, as `contexts`
    starts: list[int]  # query_starts, on the host
    contexts: list[int]  # [S] tokens up to the last query
    tables_here: Tensor  # `tables`, on the host

    @staticmethod
    def of(tables: Tensor, starts: list[int], contexts: list[int]) -> PagedQueries:
        """The same from the host's lists, copied to the device of `tables`."""
        query_starts, there = (torch.tensor(x, dtype=torch.int32, device=tables.device) for x in (starts, contexts))
        return PagedQueries(tables, query_starts, there, starts, contexts, tables.cpu())

    @property
    def lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.starts, self.starts[1:])]


class PagedAttention(Protocol):
    """What lies past a context has no influence. Both return what each layer of the step calls."""

    def decode(self, tables: Tensor, contexts: Tensor, queries: int = 1) -> Attend:
        """The last `queries` tokens of each of R sequences, in shapes that a CUDA graph can hold.

        tables [R, W], contexts [R] int32: tokens up to the last query of each.
        """
        ...

    def mixed(self, queries: PagedQueries) -> Attend:
        """Any mix of prefill and decode."""
        ...


class TorchAttention:
    """Gathers keys and values. In mixed steps each sequence that has several queries is a call of its own."""

    def __init__(self, shape: CacheShape) -> None:
        pass

    def decode(self, tables: Tensor, contexts: Tensor, queries: int = 1) -> Attend:
        runs = _each_query(tables, contexts, queries)
        return lambda q, keys, values: _gathered_decode(q, keys, values, *runs)

    def mixed(self, queries: PagedQueries) -> Attend:
        return lambda q, keys, values: _gathered_mixed(q, keys, values, queries)


class FlashAttention:
    def __init__(self, shape: CacheShape) -> None:
        self._flash: Any = import_flash_attention()[0]

    def decode(self, tables: Tensor, contexts: Tensor, queries: int = 1) -> Attend:
        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            runs = dict(cache_seqlens=contexts, block_table=tables)
            several = q.unflatten(0, (-1, queries))
            return self._flash.flash_attn_with_kvcache(several, keys, values, **runs, causal=True).flatten(0, 1)

        return attend

    def mixed(self, queries: PagedQueries) -> Attend:
        key_starts = F.pad(queries.contexts_there.cumsum(0, dtype=torch.int32), (1, 0))
        runs = queries.query_starts, key_starts, max(queries.lengths), max(queries.contexts)

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._flash.flash_attn_varlen_func(q, keys, values, *runs, causal=True, block_table=queries.tables)

        return attend


class TritonAttention:
    def __init__(self, shape: CacheShape) -> None:
        from rlhfuse.models.gpu import paged_attention as kernels  # Triton is not for runs on the CPU

        self._kernels = kernels
        self._counters = kernels.DecodeCounters(shape.device, shape.most_sequences * shape.kv_heads)
        on_cuda = shape.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(shape.device).multi_processor_count if on_cuda else 1

    def decode(self, tables: Tensor, contexts: Tensor, queries: int = 1) -> Attend:
        runs = tables, contexts, self._counters, self._processors
        return lambda q, keys, values: self._kernels.decode(q, keys, values, *runs)

    def mixed(self, queries: PagedQueries) -> Attend:
        runs = queries.tables, queries.contexts_there, queries.query_starts, self._counters, self._processors
        most = max(queries.lengths)
        return lambda q, keys, values: self._kernels.mixed(q, keys, values, *runs, most)


class FlashInfer:
    def __init__(self, shape: CacheShape) -> None:
        sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens
        self._kernels = FlashInferAttention(shape.dtype, shape.device, *sizes)

    def decode(self, tables: Tensor, contexts: Tensor, queries: int = 1) -> Attend:
        return self._kernels.decode(*_each_query(tables, contexts, queries))  # XQA takes one query of a sequence

    def mixed(self, queries: PagedQueries) -> Attend:
        return self._kernels.mixed(queries.tables_here, queries.starts, queries.contexts)


KERNELS: dict[str, Callable[[CacheShape], PagedAttention]] = {
    "flashinfer": FlashInfer,
    "triton": TritonAttention,
    "flash_attn": FlashAttention,
    "torch": TorchAttention,
}


def obstacle(name: str, shape: CacheShape) -> str | None:
    """Why these kernels cannot serve; None if they can."""
    cache = shape.dtype, shape.device
    if name == "flashinfer":
        return flashinfer_obstacle(*cache, shape.heads // shape.kv_heads, shape.head_dim, shape.block_tokens)
    if name == "triton":
        return triton_obstacle(*cache, shape.head_dim)
    return flash_obstacle(*cache, shape.head_dim, shape.block_tokens) if name == "flash_attn" else None


def triton_obstacle(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    if not 1 <= head_dim <= 256:
        return f"the Triton kernels take a head_dim of up to 256, not {head_dim}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernels need compute capability 8.0"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton computes on CUDA, and on {device.type} only in its interpreter (TRITON_INTERPRET=1)"
    try:
        import rlhfuse.models.gpu.paged_attention  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return None


def flash_obstacle(dtype: torch.dtype, device: torch.device, head_dim: int, block_tokens: int) -> str | None:
    if device.type != "cuda":
        return "flash-attn runs on CUDA alone"
    module, reason = import_flash_attention()
    if module is None:
        return reason
    if dtype == torch.float32:
        return "flash-attn computes in 16 bits, not in float32"
    if head_dim % 8 or head_dim > 256:
        return f"flash-attn takes a head_dim of multiples of 8 up to 256, not {head_dim}"
    if block_tokens % FLASH_BLOCK:
        return f"flash-attn reads blocks of a multiple of {FLASH_BLOCK} tokens, not {block_tokens}"
    return None


@dataclass(frozen=True, eq=False)
class ChosenAttention:
    name: str
    kernels: PagedAttention
    passed_over: tuple[str, ...]  # why not those before it

    def line(self) -> str:
        reasons = "".join(f"; {reason}" for reason in self.passed_over)
        return f"attention of generation: {self.name}{reasons}"


def choose_attention(shape: CacheShape, wanted: str = "auto") -> ChosenAttention:
    """The first kernels of the list that can serve, or those `wanted`; elsewhere than on CUDA auto is torch.

    Raises InputError where the wanted ones cannot. Libraries that compile do so here, for minutes the first time.
    """
    names = [wanted] if wanted != "auto" else list(KERNELS) if shape.device.type == "cuda" else ["torch"]
    reasons: list[str] = []
    for name in names:
        reason = obstacle(name, shape)
        if reason is None:
            try:
                return ChosenAttention(name, KERNELS[name](shape), tuple(reasons))
            except (ImportError, OSError, RuntimeError) as error:  # a library's kernels that don't compile
                reason = f"{name} cannot be made ready: {next(iter(str(error).splitlines()), type(error).__name__)}"
        reasons.append(reason)
    raise InputError(f"rollout.attention={wanted} cannot serve: {reasons[-1]}; use auto")


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


def _each_query(tables: Tensor, contexts: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Tables and contexts of R * queries sequences of one query, which read the same blocks."""
    if queries == 1:
        return tables, contexts
    before = torch.arange(1 - queries, 1, dtype=contexts.dtype, device=contexts.device)
    return tables.repeat_interleave(queries, 0), (contexts[:, None] + before).flatten()


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
