"""Triton kernels of a decoder layer between its matrix products: residual and norm, placement of heads, SwiGLU.

A layer is then nine launches: add_norm, qkv, place_heads, attention, proj, add_norm, fc1, swiglu, fc2. Sums and
products are float32. Engine and training launch the same kernels, so that both round alike. Letters: T tokens, C
hidden, H query heads, G key/value heads, D head_dim, F columns of the MLP; bytes are of 16-bit numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhfuse.base.power_of_two import power_of_two

Pair = tuple[Tensor, Tensor]

COLUMNS = 1024  # of SwiGLU that a program takes


@triton.jit
def add_norm_kernel(
    x, delta, bias, weight, total, out, scales, eps,
    size: tl.constexpr, DELTA: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): total = x + (delta + bias), which may be x itself; out: its norm; scales [T]: its 1 / rms."""
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = tl.program_id(0).to(tl.int64) * size + columns
    kind = x.dtype.element_ty
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            added = (added + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        rounded = (row + added).to(kind)
        tl.store(total + at, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / size + eps)
    if SCALES:
        tl.store(scales + tl.program_id(0), scale)
    normed = row * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(kind), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # parts of one tensor: it follows from the rows
def place_heads_kernel(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q, keys, values, eps, groups: tl.constexpr, heads: tl.constexpr,
    half: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, group): rows 0:heads of a tile are queries, row `heads` is the key; the value is copied.

    Without SLOTS keys and values go to their tokens' own places.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim: tl.constexpr = 2 * half
    kind = qkv.dtype.element_ty
    rows, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    visible = columns < half
    inside = (rows <= heads)[:, None] & visible[None, :]
    base = qkv + (token * groups + group) * (heads + 2) * dim
    at = rows[:, None] * dim + columns[None, :]
    first = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + at + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / dim + eps)[:, None]
        key = (rows == heads)[:, None]
        of_queries = tl.load(q_norm + columns, mask=visible, other=0.0).to(tl.float32)[None, :]
        of_keys = tl.load(k_norm + columns, mask=visible, other=0.0).to(tl.float32)[None, :]
        first = (first * scale * tl.where(key, of_keys, of_queries)).to(kind).to(tl.float32)
        of_queries = tl.load(q_norm + half + columns, mask=visible, other=0.0).to(tl.float32)[None, :]
        of_keys = tl.load(k_norm + half + columns, mask=visible, other=0.0).to(tl.float32)[None, :]
        second = (second * scale * tl.where(key, of_keys, of_queries)).to(kind).to(tl.float32)
    angle = tl.load(positions + token) * half + columns
    c = tl.load(cos + angle, mask=visible, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=visible, other=0.0)[None, :]
    turned = (first * c - second * s).to(kind)
    turned_second = (second * c + first * s).to(kind)
    queries = (rows < heads)[:, None] & visible[None, :]
    q_at = q + (token * groups + group) * heads * dim + at
    tl.store(q_at, turned, mask=queries)
    tl.store(q_at + half, turned_second, mask=queries)

    slot = token
    if SLOTS:
        slot = tl.load(slots + token)
    place = (slot * groups + group) * dim
    key = (rows == heads)[:, None] & visible[None, :]
    k_at = keys + place + columns[None, :] + rows[:, None] * 0
    tl.store(k_at, turned, mask=key)
    tl.store(k_at + half, turned_second, mask=key)
    v = base + (heads + 1) * dim + columns
    tl.store(values + place + columns, tl.load(v, mask=visible, other=0.0), mask=visible)
    tl.store(values + place + half + columns, tl.load(v + half, mask=visible, other=0.0), mask=visible)


@triton.jit
def swiglu_kernel(x, out, width: tl.constexpr, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


def norm_tile(size: int, columns: int = 512, most: int = 8) -> dict[str, Any]:
    """Constants of kernels whose program takes a row of `size` columns, with a warp per `columns`, at most `most`."""
    block = power_of_two(size)
    return dict(size=size, BLOCK=block, num_warps=min(most, max(1, block // columns)))


def heads_tile(heads: int, dim: int, groups: int) -> dict[str, Any]:
    """Constants of kernels whose program takes the `heads` queries of a token and group, their key and their value."""
    block_h, block_d = power_of_two(heads + 1), power_of_two(dim // 2)
    blocks = dict(BLOCK_H=block_h, BLOCK_D=block_d, num_warps=min(4, max(1, block_h * block_d // 256)))
    return dict(groups=groups, heads=heads, half=dim // 2) | blocks


def add_norm(x: Tensor, delta: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """As decode_layer.py's; x and delta contiguous.

    Bytes: 8 T C, or 4 T C without a delta: x and delta read, x and the result written.
    """
    tokens, size = x.shape
    out = torch.empty_like(x)
    if tokens:
        launch: Any = add_norm_kernel[(tokens,)]
        some, also = x if delta is None else delta, x if bias is None else bias
        which = dict(DELTA=delta is not None, BIAS=bias is not None, SCALES=False)
        launch(x, some, also, weight, x, out, x, eps, **which, **norm_tile(size))
    return out


def place_heads(qkv: Tensor, norms: Pair | None, eps: float, rotary: Pair, places: Pair, cache: Pair) -> Tensor:
    """As decode_layer.py's; qkv contiguous.

    Bytes: 4 T (H + 2 G) D, each number read and written once, and 4 T D of angles, mostly from L2.
    """
    groups, dim = cache[0].shape[2:]
    tokens, heads = len(qkv), qkv.shape[1] // (groups * dim) - 2
    q = qkv.new_empty(tokens, groups * heads, dim)
    if tokens:
        weights = norms or (qkv, qkv)
        launch: Any = place_heads_kernel[(tokens, groups)]
        which = dict(NORM=norms is not None, SLOTS=True)
        launch(qkv, *weights, *rotary, *places, q, *cache, eps, **which, **heads_tile(heads, dim, groups))
    return q


def gate_rows(x: Tensor) -> Tensor:
    """silu(gate) * up [..., W] of x [..., 2 W]; without a graph. Bytes of 16-bit numbers: 6 R W."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if out.numel():
        width = out.shape[-1]
        launch: Any = swiglu_kernel[out.numel() // width, triton.cdiv(width, COLUMNS)]
        launch(x, out, width=width, COLUMNS=COLUMNS)
    return out
