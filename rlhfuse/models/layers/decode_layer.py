"""What a decoder layer does between its products: in torch here, as Triton kernels beside it.

Letters: T tokens, C hidden, H query heads, G key/value heads, D head_dim, F columns of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhfuse.models.layers.norm import rms_norm
from rlhfuse.models.layers.rotation import rotate_packed
from rlhfuse.models.layers.swiglu import swiglu

Pair = tuple[Tensor, Tensor]


class LayerKernels(NamedTuple):
    """The signatures and results of the functions below."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, float], Tensor]
    place_heads: Callable[..., Tensor]
    swiglu: Callable[[Tensor], Tensor]


def layer_kernels(in_triton: bool) -> LayerKernels:
    if not in_triton:
        return LayerKernels(add_norm, place_heads, swiglu)
    from rlhfuse.models.layers import decode_layer_triton  # Triton is not for runs on the CPU

    return LayerKernels(decode_layer_triton.add_norm, decode_layer_triton.place_heads, decode_layer_triton.gate_rows)


def add_norm(x: Tensor, delta: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x + (delta + bias), which is written over x; without a delta, of x. x, delta [T, C]."""
    if delta is not None:
        x.add_(delta if bias is None else delta + bias)
    return rms_norm(x, weight, eps)


def place_heads(qkv: Tensor, norms: Pair | None, eps: float, rotary: Pair, places: Pair, cache: Pair) -> Tensor:
    """Queries, normed and turned [T, H, D]; keys, alike, and values go to their slots of the cache.

    qkv [T, G * (H / G + 2) * D], of each group its queries, key and value; norms: weights [D] of q and k;
    rotary: cos and sin [context, D / 2] float32; places: positions and slots [T] int64; cache: keys and values
    [blocks, block_tokens, G, D].
    """
    (positions, slots), (keys, values) = places, cache
    groups, dim = keys.shape[2:]
    grouped = qkv.view(len(qkv), groups, -1, dim)
    turning, value = grouped[:, :, :-1], grouped[:, :, -1]
    if norms is not None:
        parts = zip((turning[:, :, :-1], turning[:, :, -1:]), norms)
        turning = torch.cat([rms_norm(part, weight, eps) for part, weight in parts], dim=2)
    turned = rotate_packed(turning.flatten(1, 2), rotary, positions).view(turning.shape)
    keys.flatten(0, 1).index_copy_(0, slots, turned[:, :, -1])
    values.flatten(0, 1).index_copy_(0, slots, value)
    return turned[:, :, :-1].reshape(len(qkv), -1, dim)
