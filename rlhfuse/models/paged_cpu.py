"""Attention over a block-wise KV cache on CPU: two numba kernels, the same for prefill and decode.

The value of one (query token, head) is computed by itself, over the blocks of its sequence in absolute order:

    scores[j] = scale * q . k_j           token j at lane j % block_tokens, dimensions added in order
    weights   = exp(scores - max)         lanes summed block after block, then lane after lane
    out       = sum_j weights[j] * v_j    tokens added in order

so its bits depend on nothing but the query and the first `context` tokens: not on the other sequences, on how
the prompt was cut into chunks, or on which blocks hold it. Keys lie as [block, kv_head, head_dim, block_tokens]
so that the score loop runs over tokens, values as [block, kv_head, block_tokens, head_dim]: both inner loops
vectorise without fast-math, which would break the fixed order.

Letters: T query tokens, H query heads, G key/value heads, D head_dim, S sequences. Knows nothing of torch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlhfuse.models.cpu_math import F32, exp32, store, widen


@njit(forceinline=True)
def _normalise(x, weight, eps):
    """RMS norm of one head, in place; an empty weight means no norm (only Qwen3 has one)."""
    if weight.shape[0]:
        total = F32(0.0)
        for d in range(x.shape[0]):
            total += x[d] * x[d]
        inverse = F32(1.0) / np.sqrt(total / F32(x.shape[0]) + eps)
        for d in range(x.shape[0]):
            x[d] = x[d] * inverse * weight[d]


@njit(forceinline=True)
def _rotate(x, cos, sin):
    """Rotary embedding of one head, in place, halves rotated against each other."""
    half = x.shape[0] // 2
    for d in range(half):
        a, b = x[d], x[d + half]
        x[d] = a * cos[d] - b * sin[d]
        x[d + half] = b * cos[d] + a * sin[d]


@njit(cache=True, nogil=True)
def store_qkv(qkv, positions, slots, cos, sin, q_norm, k_norm, eps, keys, values, q_out):
    """Norm and rotate queries and keys, write keys and values into their slots and queries to `q_out`.

    qkv [T, G * (H/G + 2) * D] float32, per KV group its queries, key, value; positions, slots [T];
    cos, sin [context, D/2]; keys, values: one layer of the cache (float32, or bfloat16 as uint16);
    q_out [at least T, H, D] float32.
    """
    groups, block_tokens, dim = values.shape[1], values.shape[2], values.shape[3]
    per_group = q_out.shape[1] // groups
    for t in range(positions.shape[0]):
        block, offset = slots[t] // block_tokens, slots[t] % block_tokens
        row_cos, row_sin = cos[positions[t]], sin[positions[t]]
        for g in range(groups):
            start = g * (per_group + 2) * dim
            for h in range(per_group):
                q = q_out[t, g * per_group + h]
                for d in range(dim):
                    q[d] = qkv[t, start + h * dim + d]
                _normalise(q, q_norm, eps)
                _rotate(q, row_cos, row_sin)
            k = qkv[t, start + per_group * dim : start + (per_group + 1) * dim]
            _normalise(k, k_norm, eps)
            _rotate(k, row_cos, row_sin)
            for d in range(dim):
                store(keys, (block, g, d, offset), k[d])
                store(values, (block, g, offset, d), qkv[t, start + (per_group + 1) * dim + d])


@njit(forceinline=True)
def _score_block(q, key, row, scale):
    """row[j] = scale * q . key[:, j], the dimensions added in order."""
    for j in range(row.shape[0]):
        row[j] = F32(0.0)
    dim = q.shape[0]
    for d in range(0, dim - dim % 4, 4):
        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
        k0, k1, k2, k3 = key[d], key[d + 1], key[d + 2], key[d + 3]
        for j in range(row.shape[0]):
            row[j] = row[j] + q0 * widen(k0[j]) + q1 * widen(k1[j]) + q2 * widen(k2[j]) + q3 * widen(k3[j])
    for d in range(dim - dim % 4, dim):
        for j in range(row.shape[0]):
            row[j] = row[j] + q[d] * widen(key[d, j])
    for j in range(row.shape[0]):
        row[j] = row[j] * scale


@njit(forceinline=True)
def _add_values(weights, value, count, out):
    """out += sum over the first `count` tokens of a block, in order."""
    for j in range(0, count - count % 4, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        v0, v1, v2, v3 = value[j], value[j + 1], value[j + 2], value[j + 3]
        for d in range(out.shape[0]):
            out[d] = out[d] + w0 * widen(v0[d]) + w1 * widen(v1[d]) + w2 * widen(v2[d]) + w3 * widen(v3[d])
    for j in range(count - count % 4, count):
        for d in range(out.shape[0]):
            out[d] = out[d] + weights[j] * widen(value[j, d])


@njit(forceinline=True)
def _attend(q, keys, values, table, context, group, scale, scores, lanes, out):
    """Attention of one query head over the first `context` tokens of one sequence."""
    block_tokens = values.shape[2]
    blocks = (context + block_tokens - 1) // block_tokens
    for j in range(block_tokens):
        lanes[j] = F32(-np.inf)
    for b in range(blocks):
        row = scores[b]
        _score_block(q, keys[table[b], group], row, scale)
        for j in range(context - b * block_tokens, block_tokens):
            row[j] = F32(-np.inf)  # past the end of the sequence: whatever the block holds there
        for j in range(block_tokens):
            lanes[j] = row[j] if row[j] > lanes[j] or row[j] != row[j] else lanes[j]
    highest = lanes[0]
    for j in range(1, block_tokens):
        highest = lanes[j] if lanes[j] > highest or lanes[j] != lanes[j] else highest
    for j in range(block_tokens):
        lanes[j] = F32(0.0)
    for d in range(out.shape[0]):
        out[d] = F32(0.0)
    for b in range(blocks):
        row = scores[b]
        for j in range(block_tokens):
            row[j] = exp32(row[j] - highest)
            lanes[j] = lanes[j] + row[j]
        _add_values(row, values[table[b], group], min(block_tokens, context - b * block_tokens), out)
    total = F32(0.0)
    for j in range(block_tokens):
        total += lanes[j]
    for d in range(out.shape[0]):
        out[d] = out[d] / total


@njit(cache=True, nogil=True)
def paged_attention(q, keys, values, tables, query_starts, contexts, scale, out):
    """out[t] = attention of query t over its sequence up to itself.

    q, out [T, H, D] float32; keys [blocks, G, D, block_tokens], values [blocks, G, block_tokens, D];
    tables [S, most blocks]; sequence s owns queries query_starts[s]:query_starts[s + 1], the last of them at
    position contexts[s] - 1.
    """
    per_group = q.shape[1] // values.shape[1]
    block_tokens = values.shape[2]
    scores = np.empty((tables.shape[1], block_tokens), np.float32)
    lanes = np.empty(block_tokens, np.float32)
    for s in range(contexts.shape[0]):
        end = query_starts[s + 1]
        for t in range(query_starts[s], end):
            context = contexts[s] - (end - 1 - t)
            for h in range(q.shape[1]):
                _attend(
                    q[t, h], keys, values, tables[s], context, h // per_group, scale, scores, lanes, out[t, h]
                )
