"""Attention over a block-wise KV cache on CPU, the same kernel for prefill and decode.

Each (query token, head) is computed by itself over the blocks of its sequence in absolute order, so its bits depend on
nothing but the query and the first `context` tokens. A *piece* is LANES tokens of a block; the heads of a group, or the
queries of a prompt side by side, share the loads of keys and values. The layout is gen/cpu/forward.py's LaneKVCache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from rlhfuse.models.cpu.elementwise import F32, exp32
from rlhfuse.models.cpu.tiles import LANES, WIDE, make_tile, shares

PIECES = 4 if WIDE else 2  # of keys at once: so many chains of additions run side by side
RUN = 4  # queries of one sequence that share the loads of keys and values

_score_4 = make_tile(4, PIECES, ahead="panels")
_score_2 = make_tile(2, PIECES, ahead="panels")
_score_1 = make_tile(1, PIECES, ahead="panels")
_value_4 = make_tile(4, 4, add=True, ahead="panels")
_value_2 = make_tile(2, 4, add=True, ahead="panels")
_value_1 = make_tile(1, 4, add=True, ahead="panels")
_value_4_narrow = make_tile(4, 1, add=True)
_value_2_narrow = make_tile(2, 1, add=True)
_value_1_narrow = make_tile(1, 1, add=True)


@njit(forceinline=True)
def _list_pieces(table, context, group, keys, values, key_at, value_at):
    """Where each piece of a sequence of `context` tokens begins in keys and values; returns their number.

    key_at goes on with the places of the values, counted from the keys' first element: what will be read next.
    """
    groups, dim, key_lanes = keys.shape[1], keys.shape[2], keys.shape[3]
    block_tokens, value_dim = values.shape[2], values.shape[3]
    pieces = 0
    for b in range((context + block_tokens - 1) // block_tokens):
        block = np.int64(table[b]) * groups + group
        for start in range(0, min(block_tokens, context - b * block_tokens), LANES):
            key_at[pieces] = block * dim * key_lanes + start
            value_at[pieces] = (block * block_tokens + start) * value_dim
            pieces += 1
    for spare in range(pieces, (pieces + PIECES - 1) // PIECES * PIECES):
        key_at[spare] = key_at[pieces - 1]  # whole groups are computed: the spare scores are never looked at
    rounded, between = (pieces + PIECES - 1) // PIECES * PIECES, _between(keys, values)
    for i in range(pieces):
        key_at[rounded + i] = between + value_at[i]
    return pieces


@njit(forceinline=True)
def _between(keys, values):
    """Elements from the first key to the first value."""
    return (values.ctypes.data - keys.ctypes.data) // keys.itemsize


@njit(forceinline=True)
def _list_next(table, context, group, keys, block_tokens, key_at, end):
    """Write to key_at[end:] where the first pieces of the next (sequence, group) begin, its last one repeated."""
    groups, dim, key_lanes = keys.shape[1], keys.shape[2], keys.shape[3]
    per_block = (block_tokens + LANES - 1) // LANES
    blocks = (context + block_tokens - 1) // block_tokens
    for i in range(PIECES):
        b = min(i // per_block, blocks - 1)
        key_at[end + i] = (np.int64(table[b]) * groups + group) * dim * key_lanes + i % per_block * LANES


@njit(forceinline=True)
def _piece_position(piece, block_tokens):
    """Position in the sequence of a piece's first token."""
    per_block = (block_tokens + LANES - 1) // LANES
    return piece // per_block * block_tokens + piece % per_block * LANES


@njit(forceinline=True)
def _count(piece, context, block_tokens):
    """Tokens of a piece that lie before `context`; negative if it begins later."""
    start = _piece_position(piece, block_tokens)
    block_end = (start // block_tokens + 1) * block_tokens
    return min(LANES, min(block_end, context) - start)


@njit(forceinline=True)
def _softmax(row, pieces, context, block_tokens, scale, lanes):
    """Scores of the first `context` tokens to weights, in place, the others to zero; returns the sum of the weights."""
    length = pieces * LANES  # short loops over one array each: those LLVM turns into vector code
    for i in range(pieces):
        for j in range(max(_count(i, context, block_tokens), 0), LANES):
            row[i * LANES + j] = F32(-np.inf)  # past the end: whatever the block holds there
    for j in range(length):
        row[j] = row[j] * scale
    for j in range(LANES):
        lanes[j] = F32(-np.inf)
    for start in range(0, length, LANES):
        for j in range(LANES):
            score = row[start + j]
            lanes[j] = score if score > lanes[j] or score != score else lanes[j]
    highest = lanes[0]
    for j in range(1, LANES):
        highest = lanes[j] if lanes[j] > highest or lanes[j] != lanes[j] else highest
    for j in range(length):
        row[j] = exp32(row[j] - highest)
    for j in range(LANES):
        lanes[j] = F32(0.0)
    if block_tokens % LANES == 0:
        for start in range(0, length, LANES):
            for j in range(LANES):
                lanes[j] += row[start + j]
    else:  # the same sums, whatever the size of blocks
        for i in range(pieces):
            for j in range(_count(i, context, block_tokens)):
                lanes[(_piece_position(i, block_tokens) + j) % LANES] += row[i * LANES + j]
    total = F32(0.0)
    for j in range(LANES):
        total += lanes[j]
    return total


@njit(forceinline=True)
def _score(rows, q, q_at, q_row, keys, key_at, pieces, scores, row):
    """scores[r, :] = q_r . keys, all pieces; q_r begins at q_at + r * q_row."""
    dim, step = keys.shape[2], keys.shape[3]
    for first in range(0, pieces, PIECES):
        at = first * LANES
        if rows == 4:
            _score_4(q, q_at, q_row, keys, key_at, first, step, dim, scores, at, row, LANES, PIECES)
        elif rows == 2:
            _score_2(q, q_at, q_row, keys, key_at, first, step, dim, scores, at, row, LANES, PIECES)
        else:
            _score_1(q, q_at, q_row, keys, key_at, first, step, dim, scores, at, row, LANES, PIECES)


@njit(forceinline=True)
def _add_values(first, rows, weights, row, values, value_at, piece, following, count, offsets, sums):
    """sums[r, :] += weights[r, :] @ values of the first `count` tokens of a piece, for rows first:first + rows.

    `following`: a place, counted from the first value, that will be read later.
    """
    width = values.shape[3]
    chunks = width // LANES
    for c in range(chunks):
        offsets[c] = value_at[piece] + c * LANES
        offsets[chunks + c] = following + c * LANES
    at, c = first * row + piece * LANES, 0
    while c < chunks:
        to = first * width + c * LANES
        if c + 4 <= chunks:
            if rows == 4:
                _value_4(weights, at, row, values, offsets, c, width, count, sums, to, width, LANES, chunks)
            elif rows == 2:
                _value_2(weights, at, row, values, offsets, c, width, count, sums, to, width, LANES, chunks)
            else:
                _value_1(weights, at, row, values, offsets, c, width, count, sums, to, width, LANES, chunks)
            c += 4
        else:
            if rows == 4:
                _value_4_narrow(weights, at, row, values, offsets, c, width, count, sums, to, width, LANES)
            elif rows == 2:
                _value_2_narrow(weights, at, row, values, offsets, c, width, count, sums, to, width, LANES)
            else:
                _value_1_narrow(weights, at, row, values, offsets, c, width, count, sums, to, width, LANES)
            c += 1


@njit(cache=True, nogil=True, parallel=True)
def paged_attention(q, keys, values, tables, sequences, positions, runs, bounds, scale, out):
    """out = attention of every query over its sequence up to itself, in panels [P, H * D, LANES].

    q [T, H, D] float32; keys [blocks, G, D, lanes], values [blocks, G, block_tokens, padded D]: one layer of the
    cache; tables [S, most blocks]; sequences, positions, runs, bounds: see Queries. A pair is numbered
    run * G + group.
    """
    groups, dim, width = keys.shape[1], q.shape[2], values.shape[3]
    heads, per_group, block_tokens = q.shape[1], q.shape[1] // groups, values.shape[2]
    per_block = (block_tokens + LANES - 1) // LANES
    most = (tables.shape[1] * per_block + PIECES - 1) // PIECES * PIECES
    row, between = most * LANES, _between(keys, values)
    for part in prange(bounds.shape[0] - 1):
        key_at, value_at = np.empty(2 * most + PIECES, np.int64), np.empty(most, np.int64)
        offsets = np.empty(2 * (width // LANES), np.int64)
        scores, sums = np.empty((RUN, row), np.float32), np.empty((RUN, width), np.float32)
        lanes, totals = np.empty(LANES, np.float32), np.empty(RUN, np.float32)
        for pair in range(bounds[part], bounds[part + 1]):
            t, g = runs[pair // groups], pair % groups
            tokens = runs[pair // groups + 1] - t
            # the rows that share loads: adjacent queries of one head, or, where there is one token, the heads
            across = tokens == 1
            last = positions[t] + tokens
            pieces = _list_pieces(tables[sequences[t]], last, g, keys, values, key_at, value_at)
            ahead = (pieces + PIECES - 1) // PIECES * PIECES + PIECES  # values fetch what comes so many pieces later
            following = min(pair + 1, bounds[part + 1] - 1)
            t_next = runs[following // groups]
            table, context_next = tables[sequences[t_next]], positions[t_next] + 1
            end = ahead - PIECES + pieces
            _list_next(table, context_next, following % groups, keys, block_tokens, key_at, end)
            shared = pieces if across else (positions[t] + 1) // block_tokens * per_block
            done = 0
            while done < tokens * per_group:
                head = g * per_group + (done if across else done // tokens)
                token = t if across else t + done % tokens
                left = (per_group if across else tokens) - (done if across else done % tokens)
                rows = 4 if left >= 4 else 2 if left >= 2 else 1
                q_row = dim if across else heads * dim
                _score(rows, q, (token * heads + head) * dim, q_row, keys, key_at, pieces, scores, row)
                for r in range(rows):
                    context = positions[token] + 1 + (0 if across else r)
                    totals[r] = _softmax(scores[r], pieces, context, block_tokens, scale, lanes)
                    for d in range(width):
                        sums[r, d] = F32(0.0)
                # a token never touches values past its context, not even with weight zero: they may be NaN
                for i in range(shared):
                    count = _count(i, last, block_tokens)
                    later = key_at[ahead + i] - between
                    _add_values(0, rows, scores, row, values, value_at, i, later, count, offsets, sums)
                for i in range(shared, pieces):
                    for r in range(rows):
                        count = _count(i, positions[token] + 1 + r, block_tokens)
                        if count > 0:
                            later = key_at[ahead + i] - between
                            _add_values(r, 1, scores, row, values, value_at, i, later, count, offsets, sums)
                for r in range(rows):
                    at = token + (0 if across else r)
                    to = (head + (r if across else 0)) * dim
                    for d in range(dim):
                        out[at // LANES, to + d, at % LANES] = sums[r, d] / totals[r]
                done += rows


class Queries(NamedTuple):
    """The queries of one step, ready for `paged_attention`."""

    sequences: np.ndarray  # [T] which sequence
    positions: np.ndarray  # [T] position in the sequence
    runs: np.ndarray  # [runs + 1] where runs of up to RUN adjacent queries begin, and T
    bounds: np.ndarray  # [threads + 1] the (run, group) pairs of each thread, with about equally many keys to read

    @staticmethod
    def of(query_starts: np.ndarray, contexts: np.ndarray, groups: int, threads: int) -> Queries:
        """Sequence s owns queries query_starts[s]:query_starts[s + 1], the last of them at contexts[s] - 1."""
        total = int(query_starts[-1])
        if total == len(contexts):  # all decode: one query each
            sequences, positions, runs = np.arange(total), contexts - 1, query_starts
        else:
            counts = np.diff(query_starts)
            sequences = np.repeat(np.arange(len(counts)), counts)
            positions = np.arange(total) + np.repeat(contexts - query_starts[1:], counts)
            parts = -(-counts // RUN)
            order = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
            runs = np.append(np.repeat(query_starts[:-1], parts) + RUN * order, total)
        if threads == 1:
            return Queries(sequences, positions, runs, np.array([0, (len(runs) - 1) * groups]))
        costs = np.repeat((positions[runs[:-1]] + LANES) * np.diff(runs), groups)
        return Queries(sequences, positions, runs, shares(costs, threads))
