"""Causal attention of packed sequences on CPU in float32, forward and backward, as numba kernels.

Queries and keys are turned by their positions on the way in, and their gradients turned back on the way out. Each head
of each sequence is computed by itself, ROWS queries at a time over the keys that they see, so its bits depend
on its own sequence alone. A panel is LANES keys, or LANES dimensions, side by side (tiles.py). The backward computes
the weights again from scores and log-sums, BLOCK queries at a time: its memory grows with a sequence, not its square.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from rlhfuse.models.cpu.elementwise import F32, exp32, log32, turned
from rlhfuse.models.cpu.tiles import LANES, WIDE, make_tile

ROWS, PANELS = 4, 2 if WIDE else 1  # of a tile
BLOCK = PANELS * LANES  # queries whose weights the backward holds at a time: as many as a tile's keys

_tile = make_tile(ROWS, PANELS)
_tile_narrow = make_tile(ROWS, 1)
_tile_add = make_tile(ROWS, PANELS, add=True)


@njit(forceinline=True)
def _up(count, unit):
    return (count + unit - 1) // unit * unit


@njit(forceinline=True)
def _seen(last):
    """The first `last` keys, in whole tiles."""
    return _up(last, PANELS * LANES)


@njit(forceinline=True)
def _head(rows, at, head, cos, sin, position, factor, token):
    """token [D] = rows[at, head], turned by its position unless the tables are empty, times `factor`."""
    half = cos.shape[1]
    for d in range(half):
        a, b = turned(rows[at, head, d], rows[at, head, d + half], cos[position, d], sin[position, d])
        token[d], token[d + half] = a * factor, b * factor
    for d in range(2 * half, token.shape[0]):
        token[d] = rows[at, head, d]


@njit(forceinline=True)
def _put_back(token, cos, sin, position, rows, at, head):
    """rows[at, head] = the gradient `token` [D] of what `_head` turned."""
    half = cos.shape[1]
    for d in range(half):
        a, b = turned(token[d], token[d + half], cos[position, d], -sin[position, d])
        rows[at, head, d], rows[at, head, d + half] = a, b


@njit(forceinline=True)
def _to_panels(rows, start, length, head, cos, sin, token, panels):
    """panels[p, d, lane] = rows[start + p * LANES + lane, head, d], turned; zero past the sequence."""
    for p in range(_seen(length) // LANES):
        panels[p, ...] = F32(0.0)
        for lane in range(min(LANES, length - p * LANES)):
            t = p * LANES + lane
            _head(rows, start + t, head, cos, sin, t, F32(1.0), token)
            for d in range(token.shape[0]):
                panels[p, d, lane] = token[d]


@njit(forceinline=True)
def _to_rows(rows, start, first, count, head, cos, sin, factor, token, out):
    """out[t, d] = rows[start + first + t, head, d], turned, times `factor`; zero in the rest of whole tiles."""
    out[: _up(count, ROWS)] = F32(0.0)
    for t in range(count):
        _head(rows, start + first + t, head, cos, sin, first + t, factor, token)
        for d in range(token.shape[0]):
            out[t, d] = token[d]


@njit(forceinline=True)
def _transpose(rows, length, out):
    """out[d, t] = rows[t, d], of whole tiles of tokens."""
    for d in range(rows.shape[1]):
        for t in range(_up(length, ROWS)):
            out[d, t] = rows[t, d]


@njit(forceinline=True)
def _products(rows, at, panels, offsets, keys, out):
    """out[at:at + ROWS, :keys] = rows[at:at + ROWS] @ panels, of whole tiles of keys."""
    width, dim = rows.shape[1], panels.shape[1]
    for p in range(0, keys // LANES, PANELS):
        to = at * out.shape[1] + p * LANES
        _tile(rows, at * width, width, panels, offsets, p, LANES, dim, out, to, out.shape[1], LANES)


@njit(forceinline=True)
def _sum_rows(weights, at, keys, rows, offsets, out):
    """out [ROWS, width] = weights[at:at + ROWS, :keys] @ rows[:keys]."""
    row, width = weights.shape[1], rows.shape[1]
    for c in range(width // LANES):
        _tile_narrow(weights, at * row, row, rows, offsets, c, width, keys, out, c * LANES, width, LANES)


@njit(forceinline=True)
def _softmax(row, context, keys, lanes):
    """Scores of the first `context` keys to weights, in place, the rest of `keys` to zero; returns the largest score
    and the sum of the weights."""
    for j in range(context, keys):
        row[j] = F32(-np.inf)
    for j in range(LANES):
        lanes[j] = F32(-np.inf)
    for start in range(0, keys, LANES):
        for j in range(LANES):
            score = row[start + j]
            lanes[j] = score if score > lanes[j] else lanes[j]  # a NaN is passed over, the sum finds it
    for half in (8, 4, 2, 1):
        for j in range(half):
            lanes[j] = lanes[half + j] if lanes[half + j] > lanes[j] else lanes[j]
    highest = lanes[0]
    for j in range(keys):
        row[j] = exp32(row[j] - highest)
    for j in range(LANES):
        lanes[j] = F32(0.0)
    for start in range(0, keys, LANES):
        for j in range(LANES):
            lanes[j] += row[start + j]
    for half in (8, 4, 2, 1):
        for j in range(half):
            lanes[j] += lanes[half + j]
    return highest, lanes[0]


@njit(forceinline=True)
def _slopes(weights, slopes, context, keys, log_sum, delta):
    """Scores of one query to weights, their gradients to those of the scores, both in place and zero past `context`."""
    for j in range(context):
        weights[j] = exp32(weights[j] - log_sum)
    for j in range(context):
        slopes[j] = weights[j] * (slopes[j] - delta)
    for j in range(context, keys):
        weights[j] = F32(0.0)
        slopes[j] = F32(0.0)


@njit(forceinline=True)
def _add_products(columns, x, offsets, count, keys, out):
    """out [dim, :keys] += columns [dim, :count] @ x[:count, :keys], of whole tiles."""
    width = out.shape[1]
    for d in range(0, columns.shape[0], ROWS):
        for p in range(0, keys // LANES, PANELS):
            to = d * width + p * LANES
            _tile_add(columns, d * BLOCK, BLOCK, x, offsets, p, x.shape[1], _up(count, ROWS), out, to, width, LANES)


@njit(cache=True, nogil=True, parallel=True)
def attend(q, k, v, cos, sin, starts, bounds, scale, out, log_sums):
    """out [T, H, D] = attention of q [T, H, D] over k and v [T, G, D]; log_sums [T, H]: of the scores' exponentials.

    cos, sin [longest or more, D / 2] turn q and k by their positions. starts [S + 1]: rows of each sequence. Thread i
    takes the (sequence, group) pairs from bounds[i] to bounds[i + 1], which are numbered sequence * G + group.
    """
    dim, groups = q.shape[2], k.shape[1]
    per_group, wide, longest = q.shape[1] // groups, _up(dim, LANES), np.max(starts[1:] - starts[:-1])
    most = _seen(longest)
    key_at, value_at = np.arange(most // LANES) * (dim * LANES), np.arange(wide // LANES) * LANES
    for part in prange(bounds.shape[0] - 1):
        keys = np.empty((most // LANES, dim, LANES), np.float32)
        values = np.empty((_up(longest, ROWS), wide), np.float32)
        queries, scores = np.empty((ROWS, dim), np.float32), np.empty((ROWS, most), np.float32)
        token, still = np.empty(dim, np.float32), np.empty((0, 0), np.float32)
        sums, totals, lanes = (
            np.empty((ROWS, wide), np.float32),
            np.empty(ROWS, np.float32),
            np.empty(LANES, np.float32),
        )
        for pair in range(bounds[part], bounds[part + 1]):
            start, group = starts[pair // groups], pair % groups
            length = starts[pair // groups + 1] - start
            _to_panels(k, start, length, group, cos, sin, token, keys)
            _to_rows(v, start, 0, length, group, still, still, F32(1.0), token, values)
            for head in range(group * per_group, (group + 1) * per_group):
                for first in range(0, length, ROWS):
                    count = min(ROWS, length - first)
                    seen = _seen(first + count)
                    _to_rows(q, start, first, count, head, cos, sin, scale, token, queries)
                    _products(queries, 0, keys, key_at, seen, scores)
                    for t in range(count):
                        highest, totals[t] = _softmax(scores[t], first + t + 1, seen, lanes)
                        log_sums[start + first + t, head] = highest + log32(totals[t])
                    _sum_rows(scores, 0, first + count, values, value_at, sums)
                    for t in range(count):
                        for d in range(dim):
                            out[start + first + t, head, d] = sums[t, d] / totals[t]


@njit(cache=True, nogil=True, parallel=True)
def attend_backward(q, k, v, out, log_sums, gradient, cos, sin, starts, bounds, scale, dq, dk, dv):
    """Gradients of q, k and v, shaped as these, of the `gradient` [T, H, D] of what `attend` gave."""
    dim, groups = q.shape[2], k.shape[1]
    per_group, wide, longest = q.shape[1] // groups, _up(dim, LANES), np.max(starts[1:] - starts[:-1])
    most, tall = _seen(longest), _up(dim, ROWS)
    panel_at, row_at = np.arange(most // LANES) * (dim * LANES), np.arange(wide // LANES) * LANES
    weight_at = np.arange(most // LANES) * LANES
    for part in prange(bounds.shape[0] - 1):
        key_panels = np.empty((most // LANES, dim, LANES), np.float32)
        value_panels = np.empty_like(key_panels)
        keys = np.empty((_up(longest, ROWS), wide), np.float32)
        queries, gradients = np.empty((BLOCK, dim), np.float32), np.empty((BLOCK, dim), np.float32)
        query_columns, gradient_columns = np.zeros((tall, BLOCK), np.float32), np.zeros((tall, BLOCK), np.float32)
        weights, slopes = np.empty((BLOCK, most), np.float32), np.empty((BLOCK, most), np.float32)
        key_sums, value_sums = np.empty((tall, most), np.float32), np.empty((tall, most), np.float32)
        sums, token, still = np.empty((ROWS, wide), np.float32), np.empty(dim, np.float32), np.empty((0, 0), np.float32)
        for pair in range(bounds[part], bounds[part + 1]):
            start, group = starts[pair // groups], pair % groups
            length = starts[pair // groups + 1] - start
            _to_panels(k, start, length, group, cos, sin, token, key_panels)
            _to_panels(v, start, length, group, still, still, token, value_panels)
            _to_rows(k, start, 0, length, group, cos, sin, F32(1.0), token, keys)
            key_sums[...] = F32(0.0)
            value_sums[...] = F32(0.0)
            for head in range(group * per_group, (group + 1) * per_group):
                for first in range(0, length, BLOCK):
                    count = min(BLOCK, length - first)
                    _to_rows(q, start, first, count, head, cos, sin, scale, token, queries)
                    _to_rows(gradient, start, first, count, head, still, still, F32(1.0), token, gradients)
                    _transpose(queries, count, query_columns)
                    _transpose(gradients, count, gradient_columns)
                    seen = _seen(first + count)
                    for at in range(0, count, ROWS):
                        _products(queries, at, key_panels, panel_at, seen, weights)
                        _products(gradients, at, value_panels, panel_at, seen, slopes)
                        for t in range(at, at + ROWS):
                            if t < count:
                                delta = F32(0.0)
                                for d in range(dim):
                                    delta += gradients[t, d] * out[start + first + t, head, d]
                                log_sum = log_sums[start + first + t, head]
                                _slopes(weights[t], slopes[t], first + t + 1, seen, log_sum, delta)
                            else:
                                _slopes(weights[t], slopes[t], 0, seen, F32(0.0), F32(0.0))
                        rows = min(ROWS, count - at)
                        _sum_rows(slopes, at, first + at + rows, keys, row_at, sums)
                        for t in range(rows):
                            for d in range(dim):
                                token[d] = sums[t, d] * scale
                            _put_back(token, cos, sin, first + at + t, dq, start + first + at + t, head)
                    _add_products(query_columns, slopes, weight_at, count, seen, key_sums)
                    _add_products(gradient_columns, weights, weight_at, count, seen, value_sums)
            for t in range(length):
                for d in range(dim):
                    token[d] = key_sums[d, t]
                _put_back(token, cos, sin, t, dk, start + t, group)
                for d in range(dim):
                    dv[start + t, group, d] = value_sums[d, t]
