"""Rotation of queries or keys by their positions in one launch: float32 angles and products, rounded once.

Letters: T tokens, D head_dim. Heads lie anywhere in a token's row: the projection's output need not be copied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # of one program


# Positions lie behind a micro-batch's tokens: no variant is worth being compiled where their number is odd.
@triton.jit(do_not_specialize_on_alignment=["positions"])
def _turn(
    x,
    cos,
    sin,
    positions,
    out,
    token_stride,
    head_stride,
    heads,
    sign,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, WIDTH)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :] * sign
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head[:, None]) * 2 * HALF + pair[None, :]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, back: bool = False) -> Tensor:
    """x [T, heads, D] turned by the angles of its tokens' positions [T], or `back`; no graph.

    cos, sin [rows, D / 2] float32.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        sizes: Any = dict(HALF=dim // 2, HEADS=HEADS, WIDTH=triton.next_power_of_2(dim // 2))
        token_stride, head_stride, _ = x.stride()
        strides: Any = dict(token_stride=token_stride, head_stride=head_stride, heads=heads, sign=-1.0 if back else 1.0)
        _turn[tokens, triton.cdiv(heads, HEADS)](x, cos, sin, positions, out, **strides, **sizes)
    return out
