"""Backwards of the Triton kernels of decode_layer_triton.py, on the gradients of what they give.

Sums and products are float32, rounded once. Gradients of norms' weights are partial sums, one of a program, which
another kernel adds up in one order. Letters: T tokens, C hidden, D head_dim, P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "each"])
def norm_backward_kernel(
    x, weight, residual, gradient, scales, dx, parts, tokens, each, size: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (part), of `each` rows: dx = residual + the norm's gradient; parts [P, C]: of the weight."""
    part, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * each, tl.minimum((part + 1) * each, tokens)):
        at = row * size + columns
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        sums += g * normed
        weighted = g * w
        along = tl.sum(weighted * normed, 0) / size
        total = (weighted - normed * along) * scale
        if RESIDUAL:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + part * size + columns, sums, mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["total"])  # a part of Megatron's buffer
def add_parts_kernel(parts, total, count, size: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (columns): total [C] float32 += the sum of parts [`count`, C]."""
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        row = (start + rows)[:, None]
        sums += tl.load(parts + row * size + columns[None, :], mask=(row < count) & inside[None, :], other=0.0)
    tl.store(total + columns, tl.load(total + columns, mask=inside) + tl.sum(sums, 0), mask=inside)


@triton.jit(do_not_specialize=["tokens", "each"], do_not_specialize_on_alignment=["positions"])
def join_kernel(
    qkv, q_norm, k_norm, dq, dk, dv, cos, sin, positions, dqkv, parts, eps, tokens, each, groups: tl.constexpr,
    heads: tl.constexpr, half: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (part, group), of `each` tokens: the gradient of what `place_heads_kernel` took.

    With NORM it reads that again, and parts [2, P, D] are of the gradients of both norms' weights.
    """
    part, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim: tl.constexpr = 2 * half
    kind = dqkv.dtype.element_ty
    rows, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    visible = columns < half
    queries, key = (rows < heads)[:, None] & visible[None, :], (rows == heads)[:, None] & visible[None, :]
    at, k_at = rows[:, None] * dim + columns[None, :], rows[:, None] * 0 + columns[None, :]
    sums, sums_second = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    if NORM:
        w = tl.load(q_norm + k_at, mask=queries, other=0.0).to(tl.float32)
        w += tl.load(k_norm + k_at, mask=key, other=0.0).to(tl.float32)
        w_second = tl.load(q_norm + half + k_at, mask=queries, other=0.0).to(tl.float32)
        w_second += tl.load(k_norm + half + k_at, mask=key, other=0.0).to(tl.float32)
    for token in range(part * each, tl.minimum((part + 1) * each, tokens)):
        place = (token * groups + group) * dim
        d = tl.load(dq + place * heads + at, mask=queries, other=0.0).to(tl.float32)
        d += tl.load(dk + place + k_at, mask=key, other=0.0).to(tl.float32)
        d_second = tl.load(dq + place * heads + half + at, mask=queries, other=0.0).to(tl.float32)
        d_second += tl.load(dk + place + half + k_at, mask=key, other=0.0).to(tl.float32)
        angle = tl.load(positions + token) * half + columns
        c = tl.load(cos + angle, mask=visible, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=visible, other=0.0)[None, :]
        first, second = d * c + d_second * s, d_second * c - d * s  # turned back
        wide = place * (heads + 2)
        if NORM:
            x = tl.load(qkv + wide + at, mask=queries | key, other=0.0).to(tl.float32)
            x_second = tl.load(qkv + wide + half + at, mask=queries | key, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(x_second * x_second, 1)) / dim + eps)[:, None]
            x, x_second = x * scale, x_second * scale
            sums += first * x
            sums_second += second * x_second
            first, second = first * w, second * w_second
            along = ((tl.sum(first * x, 1) + tl.sum(second * x_second, 1)) / dim)[:, None]
            first, second = (first - x * along) * scale, (second - x_second * along) * scale
        tl.store(dqkv + wide + at, first.to(kind), mask=queries | key)
        tl.store(dqkv + wide + half + at, second.to(kind), mask=queries | key)
        to_v = dqkv + wide + (heads + 1) * dim + columns
        tl.store(to_v, tl.load(dv + place + columns, mask=visible, other=0.0), mask=visible)
        tl.store(to_v + half, tl.load(dv + place + half + columns, mask=visible, other=0.0), mask=visible)
    if NORM:
        of_q = parts + (part * groups + group) * dim + columns
        of_k = of_q + tl.num_programs(0) * groups * dim
        tl.store(of_q, tl.sum(tl.where(queries, sums, 0.0), 0), mask=visible)
        tl.store(of_q + half, tl.sum(tl.where(queries, sums_second, 0.0), 0), mask=visible)
        tl.store(of_k, tl.sum(tl.where(key, sums, 0.0), 0), mask=visible)
        tl.store(of_k + half, tl.sum(tl.where(key, sums_second, 0.0), 0), mask=visible)


@triton.jit
def swiglu_backward_kernel(
    x, gradient, dx, out, width: tl.constexpr, AGAIN: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """dx; with AGAIN also what `swiglu_kernel` gave, for the weight's gradient of the product that took it."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    activation = gate * share
    dgate = dy * up * (share + activation * (1.0 - share))
    kind = dx.dtype.element_ty
    tl.store(dx + row * 2 * width + at, dgate.to(kind), mask=inside)
    tl.store(dx + row * 2 * width + width + at, (dy * activation).to(kind), mask=inside)
    if AGAIN:
        tl.store(out + row * width + at, (activation * up).to(kind), mask=inside)
