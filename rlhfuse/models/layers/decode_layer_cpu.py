"""A decoder layer on CPU, as numba kernels over panels of LANES tokens: norm, products, rotary embedding, MLP.

    x [P, F, LANES]      feature f of token p * LANES + lane lies at x[p, f, lane]

Every kernel is a loop over lanes: a token's arithmetic has a lane of its own. `threads` threads take ranges of outputs.
Weights are read where they lie, [N, K] float32, or bfloat16 as uint16. P panels, N outputs, K inputs, D head_dim.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from rlhfuse.models.cpu.elementwise import F32, sigmoid32, store, turned, widen
from rlhfuse.models.cpu.tiles import FEW, GEMM_PANELS, GEMM_ROWS, LANES, make_tile

GROUP = 12  # tiles that read one pair of panels, while it is near, before the next pair

_tile = make_tile(GEMM_ROWS, GEMM_PANELS, ahead="rows")
_tile_narrow = make_tile(GEMM_ROWS, 1, ahead="rows")
_tile_few = make_tile(GEMM_ROWS, 1, ahead="rows", lanes=FEW)
_row = make_tile(1, GEMM_PANELS)
_row_narrow = make_tile(1, 1)
_row_few = make_tile(1, 1, lanes=FEW)


@njit(forceinline=True)
def share(count, unit, part, parts):
    """First of `count` things, in whole units, that the part-th of `parts` threads takes."""
    units = (count + unit - 1) // unit
    return min(count, units * part // parts * unit)


@njit(forceinline=True)
def _product_tile(w, first, rows, x, offsets, panel, panels, few, out, out_at, out_row, out_panel):
    """out = rows first:first + rows of w, times `panels` panels of x: the one place that chooses a tile.

    `few`: there are FEW tokens at most; the other lanes of the result are left as they are, or not.
    """
    k = w.shape[1]
    if rows == GEMM_ROWS:
        if few:
            _tile_few(w, first * k, k, x, offsets, panel, LANES, k, out, out_at, out_row, out_panel)
        elif panels == GEMM_PANELS:
            _tile(w, first * k, k, x, offsets, panel, LANES, k, out, out_at, out_row, out_panel)
        else:
            for p in range(panels):
                at = out_at + p * out_panel
                _tile_narrow(w, first * k, k, x, offsets, panel + p, LANES, k, out, at, out_row, out_panel)
    else:
        for r in range(rows):
            w_at, at = (first + r) * k, out_at + r * out_row
            if few:
                _row_few(w, w_at, k, x, offsets, panel, LANES, k, out, at, out_row, out_panel)
            elif panels == GEMM_PANELS:
                _row(w, w_at, k, x, offsets, panel, LANES, k, out, at, out_row, out_panel)
            else:
                for p in range(panels):
                    _row_narrow(w, w_at, k, x, offsets, panel + p, LANES, k, out, at, out_row, out_panel)
                    at += out_panel


@njit(cache=True, nogil=True, parallel=True)
def embed(tokens, table, first_row, x):
    """x = rows of the embedding; zero for padding and for tokens of other ranks. table [rows, F], from `first_row`."""
    for p in prange(x.shape[0]):
        for lane in range(LANES):
            t = p * LANES + lane
            row = tokens[t] - first_row if t < tokens.shape[0] else -1
            if 0 <= row < table.shape[0]:
                for f in range(x.shape[1]):
                    x[p, f, lane] = widen(table[row, f])
            else:
                for f in range(x.shape[1]):
                    x[p, f, lane] = F32(0.0)


@njit(cache=True, nogil=True, parallel=True)
def add_norm(x, delta, bias, weight, eps, normed):
    """x += delta + bias; normed = x / rms(x) * weight. All [P, F, LANES], weight [F], bias [F] or empty."""
    features = x.shape[1]
    for p in prange(x.shape[0]):
        scale = np.zeros(LANES, np.float32)
        for f in range(features):
            if bias.shape[0]:
                b = widen(bias[f])
                for lane in range(LANES):
                    delta[p, f, lane] += b
            for lane in range(LANES):
                v = x[p, f, lane] + delta[p, f, lane]
                x[p, f, lane] = v
                scale[lane] += v * v
        for lane in range(LANES):
            scale[lane] = F32(1.0) / np.sqrt(scale[lane] / F32(features) + eps)
        for f in range(features):
            w = widen(weight[f])
            for lane in range(LANES):
                normed[p, f, lane] = x[p, f, lane] * scale[lane] * w


@njit(cache=True, nogil=True, parallel=True)
def multiply(w, x, offsets, tokens, out, threads):
    """out [P, N, LANES] = w [N, K] @ x [P, K, LANES], of the first `tokens` tokens."""
    panels, n, few = out.shape[0], w.shape[0], tokens <= FEW
    for part in prange(threads):
        low, high = share(n, GEMM_ROWS, part, threads), share(n, GEMM_ROWS, part + 1, threads)
        for group in range(low, high, GROUP * GEMM_ROWS):
            for panel in range(0, panels, GEMM_PANELS):
                for first in range(group, min(high, group + GROUP * GEMM_ROWS), GEMM_ROWS):
                    # `wide` stands here because LLVM makes slower code, by an eighth, where it stands outside the loop
                    rows, wide = min(GEMM_ROWS, high - first), min(GEMM_PANELS, panels - panel)
                    at = (panel * n + first) * LANES
                    _product_tile(w, first, rows, x, offsets, panel, wide, few, out, at, LANES, n * LANES)


@njit(cache=True, nogil=True, parallel=True)
def multiply_swiglu(w, x, offsets, tokens, out, threads):
    """out [P, N, LANES] = silu(gate) * up with [gate; up] = w [2 N, K] @ x: what fc1 and its activation give."""
    panels, n, few = out.shape[0], w.shape[0] // 2, tokens <= FEW
    lanes = FEW if few else LANES
    for part in prange(threads):
        low, high = share(n, GEMM_ROWS, part, threads), share(n, GEMM_ROWS, part + 1, threads)
        gate_up = np.empty((2, GEMM_PANELS, GEMM_ROWS, LANES), np.float32)
        half = GEMM_PANELS * GEMM_ROWS * LANES
        for group in range(low, high, GROUP * GEMM_ROWS):
            for panel in range(0, panels, GEMM_PANELS):
                wide = min(GEMM_PANELS, panels - panel)
                for first in range(group, min(high, group + GROUP * GEMM_ROWS), GEMM_ROWS):
                    rows = min(GEMM_ROWS, high - first)
                    for side in range(2):
                        at, step = side * half, GEMM_ROWS * LANES
                        row = side * n + first
                        _product_tile(w, row, rows, x, offsets, panel, wide, few, gate_up, at, LANES, step)
                    for p in range(wide):
                        for r in range(rows):
                            for lane in range(lanes):
                                gate = gate_up[0, p, r, lane]
                                out[panel + p, first + r, lane] = gate * sigmoid32(gate) * gate_up[1, p, r, lane]


@njit(cache=True, nogil=True, parallel=True)
def multiply_to_rows(w, x, offsets, out, threads):
    """out [R, N] = (w [N, K] @ x)^T, the first R tokens of x, one row each: logits for the sampler."""
    n, rows_wanted = w.shape[0], out.shape[0]
    panels, few = (rows_wanted + LANES - 1) // LANES, rows_wanted <= FEW
    for part in prange(threads):
        low, high = share(n, GEMM_ROWS, part, threads), share(n, GEMM_ROWS, part + 1, threads)
        near = np.empty((GEMM_PANELS, GROUP * GEMM_ROWS, LANES), np.float32)
        step = GROUP * GEMM_ROWS * LANES
        for group in range(low, high, GROUP * GEMM_ROWS):
            width = min(GROUP * GEMM_ROWS, high - group)
            for panel in range(0, panels, GEMM_PANELS):
                wide = min(GEMM_PANELS, panels - panel)
                for first in range(0, width, GEMM_ROWS):
                    rows = min(GEMM_ROWS, width - first)
                    _product_tile(
                        w, group + first, rows, x, offsets, panel, wide, few, near, first * LANES, LANES, step
                    )
                for p in range(wide):
                    for lane in range(min(LANES, rows_wanted - (panel + p) * LANES)):
                        row, column = out[(panel + p) * LANES + lane, group : group + width], near[p, :width, lane]
                        for r in range(width):
                            row[r] = column[r]


@njit(cache=True, nogil=True)
def take_tokens(x, tokens, out):
    """out's first tokens = tokens[...] of x, both in panels; the rest of the last panel is zero."""
    for i in range(out.shape[0] * LANES):
        p, lane = i // LANES, i % LANES
        for f in range(out.shape[1]):
            out[p, f, lane] = x[tokens[i] // LANES, f, tokens[i] % LANES] if i < tokens.shape[0] else F32(0.0)


@njit(forceinline=True)
def _load_head(qkv, panel, first, lane, bias, head):
    """One head of one token, its bias added if there is one."""
    for d in range(head.shape[0]):
        head[d] = qkv[panel, first + d, lane]
    if bias.shape[0]:
        for d in range(head.shape[0]):
            head[d] += widen(bias[first + d])


@njit(forceinline=True)
def _norm_head(head, weight, eps):
    """RMS norm of one head, in place; an empty weight means no norm (only Qwen3 has one)."""
    if weight.shape[0]:
        total = F32(0.0)
        for d in range(head.shape[0]):
            total += head[d] * head[d]
        inverse = F32(1.0) / np.sqrt(total / F32(head.shape[0]) + eps)
        for d in range(head.shape[0]):
            head[d] = head[d] * inverse * widen(weight[d])


@njit(forceinline=True)
def _rotate(head, cos, sin):
    """Rotary embedding of one head, in place, halves rotated against each other."""
    half = head.shape[0] // 2
    for d in range(half):
        head[d], head[d + half] = turned(head[d], head[d + half], cos[d], sin[d])


@njit(cache=True, nogil=True, parallel=True)
def place_heads(qkv, positions, slots, cos, sin, bias, q_norm, k_norm, eps, keys, values, q, threads):
    """Norm and rotate queries and keys; queries to q [T, H, D], keys and values into their cache slots.

    qkv [P, G * (H/G + 2) * D, LANES], per KV group its queries, key, value; positions, slots [T]; cos, sin
    [context, D/2]; bias, q_norm, k_norm may be empty; keys, values: one layer of the cache (attention/paged/cpu.py).
    """
    groups, block_tokens = values.shape[1], values.shape[2]
    tokens, heads, dim = q.shape
    per_group = heads // groups
    for part in prange(threads):
        head = np.empty(dim, np.float32)
        for t in range(share(tokens, 1, part, threads), share(tokens, 1, part + 1, threads)):
            panel, lane = t // LANES, t % LANES
            block, offset = slots[t] // block_tokens, slots[t] % block_tokens
            for g in range(groups):
                first = g * (per_group + 2) * dim
                for h in range(per_group):
                    query = q[t, g * per_group + h]
                    _load_head(qkv, panel, first + h * dim, lane, bias, query)
                    _norm_head(query, q_norm, eps)
                    _rotate(query, cos[positions[t]], sin[positions[t]])
                _load_head(qkv, panel, first + per_group * dim, lane, bias, head)
                _norm_head(head, k_norm, eps)
                _rotate(head, cos[positions[t]], sin[positions[t]])
                for d in range(dim):
                    store(keys, (block, g, d, offset), head[d])
                _load_head(qkv, panel, first + (per_group + 1) * dim, lane, bias, head)
                for d in range(dim):
                    store(values, (block, g, offset, d), head[d])
