"""Attention over cache blocks in Triton: one query per sequence (decode), and any number of them (mixed).

The query heads that share a key/value head lie side by side in one tile, so that a key is read once for all of them.
Blocks may have any number of tokens, heads a dimension of 16 to 256. What lies behind a context is never read.
Letters: R rows of a decode step, S sequences, T tokens, H query heads, G key/value heads, D head_dim, W table columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhfuse.base.power_of_two import power_of_two
from rlhfuse.models.attention.paged.cache import PagedQueries

DECODE_SPLIT = 128  # a part of a context that is worth a program of its own, in tokens
LONGEST_SPLIT = 2048  # so that one long context among short ones doesn't hold up the others
MOST_SPLITS = 32
LOG2_E = 1.4426950408889634
# Their alignment changes with the shape of a step; no variant of a kernel is worth being compiled in the middle of one.
TABLES = ["tables", "contexts", "starts"]


@triton.jit
def _load_rows(cache, table, positions, inside, group, groups, dim, block_tokens: tl.constexpr, columns, visible):
    """[N, BLOCK_D] of one key/value head at these positions of a sequence; zeros where `inside` is false."""
    block = tl.load(table + positions // block_tokens, mask=inside, other=0).to(tl.int64)
    slot = block * block_tokens + positions % block_tokens
    at = (slot * groups + group) * dim
    return tl.load(cache + at[:, None] + columns[None, :], mask=inside[:, None] & visible[None, :], other=0.0)


@triton.jit
def _attend(
    q, sums, norm, peak, keys, values, table, first, last, ends, group, groups, scale,
    dim: tl.constexpr, block_tokens: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys first:last of a sequence to running sums [M, BLOCK_D], weights `norm` [M] and largest scores [M].

    q [M, BLOCK_D]; row m sees the keys before ends[m], all of first:last unless MASKED. `scale` is in powers of two.
    """
    columns = tl.arange(0, BLOCK_D)
    visible = columns < dim
    offsets = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        positions = start + offsets
        inside = positions < last
        k = _load_rows(keys, table, positions, inside, group, groups, dim, block_tokens, columns, visible)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(positions[None, :] < ends[:, None], scores, float("-inf"))
        scores = tl.where(inside[None, :], scores, float("-inf"))
        above = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score: any finite one will do.
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        norm = norm * shrink + tl.sum(weights, 1)
        v = _load_rows(values, table, positions, inside, group, groups, dim, block_tokens, columns, visible)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        peak = above
    return sums, norm, peak


@triton.jit(do_not_specialize=["groups", "table_stride", "split_tokens"], do_not_specialize_on_alignment=TABLES)
def _decode_kernel(
    q, keys, values, out, tables, contexts, starts, partial, counters, groups, table_stride, split_tokens, scale,
    heads: tl.constexpr, dim: tl.constexpr, block_tokens: tl.constexpr, SINGLES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row, group, split): `split_tokens` of a context. The last of a row and group to end adds them up."""
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_query = row
    if SINGLES:
        first_query = tl.load(starts + row)
        if tl.load(starts + row + 1) - first_query != 1:
            return
    context = tl.load(contexts + row)
    first = split * split_tokens
    if first >= context:
        return
    last = tl.minimum(first + split_tokens, context)
    parts = tl.cdiv(context, split_tokens)

    rows = tl.arange(0, BLOCK_M)  # row m: head m of this group
    columns = tl.arange(0, BLOCK_D)
    real = (rows < heads)[:, None] & (columns < dim)[None, :]
    at = (first_query.to(tl.int64) * groups + group) * heads + rows
    at = at[:, None] * dim + columns[None, :]
    queries = tl.load(q + at, mask=real, other=0.0)

    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums, norm, peak = _attend(
        queries, sums, norm, peak, keys, values, tables + row.to(tl.int64) * table_stride, first, last, None, group,
        groups, scale, dim, block_tokens, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    if parts == 1:
        tl.store(out + at, (sums / norm[:, None]).to(out.dtype.element_ty), mask=real)
        return

    # Of each part: sums [BLOCK_M, BLOCK_D], then norm and peak [BLOCK_M], float32.
    size: tl.constexpr = BLOCK_M * (BLOCK_D + 2)
    cell = row * groups + group
    splits = tl.num_programs(2)
    base = partial + cell.to(tl.int64) * splits * size
    inner = rows[:, None] * BLOCK_D + columns[None, :]
    mine = base + split * size
    tl.store(mine + inner, sums)
    tl.store(mine + BLOCK_M * BLOCK_D + rows, norm)
    tl.store(mine + BLOCK_M * (BLOCK_D + 1) + rows, peak)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(counters + cell, 1, sem="acq_rel") < parts - 1:
        return
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for part in range(parts):  # in the order of the context, whoever ended last: the same bits each time
        other = base + part * size
        its_peak = tl.load(other + BLOCK_M * (BLOCK_D + 1) + rows, cache_modifier=".cg")
        above = tl.maximum(peak, its_peak)
        shift = tl.where(above == float("-inf"), 0.0, above)
        ours, theirs = tl.exp2(peak - shift), tl.exp2(its_peak - shift)
        norm = norm * ours + tl.load(other + BLOCK_M * BLOCK_D + rows, cache_modifier=".cg") * theirs
        sums = sums * ours[:, None] + tl.load(other + inner, cache_modifier=".cg") * theirs[:, None]
        peak = above
    tl.store(out + at, (sums / norm[:, None]).to(out.dtype.element_ty), mask=real)
    tl.store(counters + cell, 0)  # as the next launch wants it


@triton.jit(do_not_specialize=["groups", "table_stride", "sequences"], do_not_specialize_on_alignment=TABLES)
def _chunk_kernel(
    q, keys, values, out, tables, contexts, starts, groups, table_stride, sequences, scale,
    heads: tl.constexpr, dim: tl.constexpr, block_tokens: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, group): up to TILE queries of one sequence that has several; those with one are left out."""
    tile, group = tl.program_id(0), tl.program_id(1)
    low, high = sequences * 0, sequences  # the last sequence whose tiles begin at or before this one
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    start, stop = tl.load(starts + low), tl.load(starts + low + 1)
    count = stop - start
    first_query = (tile - (start // TILE + low)) * TILE
    if (count <= 1) | (first_query >= count):
        return
    context = tl.load(contexts + low)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    query = first_query + rows // heads
    ends = context - count + 1 + query
    real = ((rows < TILE * heads) & (query < count))[:, None] & (columns < dim)[None, :]
    at = ((start + query).to(tl.int64) * groups + group) * heads + rows % heads
    at = at[:, None] * dim + columns[None, :]
    queries = tl.load(q + at, mask=real, other=0.0)

    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    table = tables + low.to(tl.int64) * table_stride
    everyone = (context - count + 1 + first_query) // BLOCK_N * BLOCK_N  # all queries of the tile see keys so far
    last = tl.minimum(context - count + first_query + TILE, context)
    sums, norm, peak = _attend(
        queries, sums, norm, peak, keys, values, table, 0, everyone, ends, group, groups, scale,
        dim, block_tokens, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    sums, norm, peak = _attend(
        queries, sums, norm, peak, keys, values, table, everyone, last, ends, group, groups, scale,
        dim, block_tokens, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip
    tl.store(out + at, (sums / norm[:, None]).to(out.dtype.element_ty), mask=real)


def decode_splits(rows: int, groups: int, most_tokens: int, processors: int) -> int:
    """Parts into which contexts of up to `most_tokens` are cut: two programs per processor, from the shape alone."""
    wanted = max(-(-2 * processors // (rows * groups)), -(-most_tokens // LONGEST_SPLIT))
    return max(1, min(wanted, -(-most_tokens // DECODE_SPLIT), MOST_SPLITS))


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    contexts: Tensor,
    counters: Tensor,
    processors: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Attention of the last tokens of R sequences; one launch, nothing read back. Returns [T, H, D].

    q [T, H, D] contiguous, T = R unless `starts` says otherwise; keys, values [blocks, block_tokens, G, D]; tables
    [R, W] and contexts [R] int32; counters: int32 zeros for R * G cells or more, which each launch leaves as zeros.
    With `starts` [R + 1] int32 only sequences of one query are computed, the others' rows of the result left as they
    are. Bytes: 2 contexts * G * D of the cache, once; q and the result; 16 float32 rows of D + 2 per row, group and
    part, written and read, where contexts are cut.
    """
    (rows, width), (_, block_tokens, groups, dim) = tables.shape, keys.shape
    heads = q.shape[1] // groups
    splits = decode_splits(rows, groups, width * block_tokens, processors)
    block_m, block_d = max(16, power_of_two(heads)), max(16, power_of_two(dim))
    block_n, warps, stages = _decode_tile(block_d, q.dtype)
    split_tokens = -(-width * block_tokens // splits // block_n) * block_n
    splits = -(-width * block_tokens // split_tokens)
    assert counters.numel() >= rows * groups, f"{rows} rows of {groups} groups need as many counters"
    partial = q.new_empty(rows * groups * splits * block_m * (block_d + 2) if splits > 1 else 1, dtype=torch.float32)
    out = torch.empty_like(q)
    launch: Any = _decode_kernel[(rows, groups, splits)]
    launch(
        q, keys, values, out, tables, contexts, contexts if starts is None else starts, partial, counters,
        groups, tables.stride(0), split_tokens, dim**-0.5 * LOG2_E,
        heads=heads, dim=dim, block_tokens=block_tokens, SINGLES=starts is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def mixed(q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, counters: Tensor, processors: int) -> Tensor:
    """Attention of the last tokens of S sequences, any number of each; one or two launches.

    q [T, H, D] contiguous. Returns [T, H, D]. Bytes: as `decode` for sequences of one query; of the others q, the
    result, and keys and values up to its last query for each tile of queries (32 of 4 heads in 16 bits), mostly of L2.
    """
    tables, contexts, starts = queries.tables, queries.contexts_there, queries.query_starts
    out = decode(q, keys, values, tables, contexts, counters, processors, starts)
    if len(q) > len(tables):
        groups, dim = keys.shape[2:]
        sequences, heads = len(tables), q.shape[1] // groups
        block_d = max(16, power_of_two(dim))
        block_m, block_n, warps, stages = _chunk_tile(block_d, q.dtype)
        block_m = max(block_m, power_of_two(heads))
        tile = block_m // heads
        launch: Any = _chunk_kernel[(len(q) // tile + sequences, groups)]
        launch(
            q, keys, values, out, tables, contexts, starts, groups, tables.stride(0), sequences, dim**-0.5 * LOG2_E,
            heads=heads, dim=dim, block_tokens=keys.shape[1],
            TILE=tile, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def _decode_tile(block_d: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """BLOCK_N, warps, stages: up to three programs with 64 KiB on the way fit into a processor of a H100."""
    if dtype == torch.float32:  # no tensor cores: what a thread multiplies lies in its registers, which must do
        return max(16, min(64, 2048 // block_d)), 8, 5
    return max(16, min(64, 8192 // block_d)), 4, 5


def _chunk_tile(block_d: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages."""
    if dtype == torch.float32:
        return 32, 16, 8, 2
    return 128 if block_d <= 128 else 64, 64, 8, 3
