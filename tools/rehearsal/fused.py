"""What torch's fused kernels hold on a GPU, where a CPU build has none and fake tensors would take them apart.

scaled_dot_product_attention would write out all scores; the flash kernel's operator has shapes for fake tensors,
forward and backward. rms_norm would keep float32 copies of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def attend_as_flash() -> Callable[..., Tensor]:
    """In the place of torch's scaled_dot_product_attention."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        flash = query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None
        if not isinstance(query, FakeTensor) or not flash:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )
        return out[0]

    return attend


class _FusedNorm(torch.autograd.Function):
    """Keeps its input, the weight and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def norm_as_fused(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """In the place of torch's rms_norm."""
    if isinstance(x, FakeTensor) and x.is_cuda and weight is not None and weight.dtype == x.dtype:
        if tuple(normalized_shape) != tuple(weight.shape) or x.shape[-1] != weight.shape[-1]:
            raise RuntimeError(f"rms_norm of {list(x.shape)} over {list(normalized_shape)} by {list(weight.shape)}")
        return _FusedNorm.apply(x, weight)  # pyright: ignore[reportReturnType]
    return torch.rms_norm(x, normalized_shape, weight, eps)


def workspace_bytes(name: str, args: Any) -> int:
    """What a kernel takes beside its outputs while it runs: flash-attention 2 in its backward.

    Query gradients and row sums in float32, rows rounded up to 128 a sequence; gradients of keys and values for every
    query head, before those of a group are summed.
    """
    if name == "_flash_attention_backward":
        query, key, borders = args[1], args[2], args[6]
        heads, dim = query.shape[-2:]
        rows, keys = query.numel() // (heads * dim), key.numel() // (key.shape[-2] * dim)
        sequences, grouped = (len(borders) - 1 if borders is not None else len(query)), key.shape[-2] != heads
    elif name == "_scaled_dot_product_flash_attention_backward":
        (batch, heads, length, dim), key = args[1].shape, args[2]
        rows, keys, sequences, grouped = batch * length, batch * key.shape[2], batch, key.shape[1] != heads
    else:
        return 0
    padded = rows + 128 * sequences
    return 4 * heads * padded * (dim + 1) + (2 * keys * heads * dim * args[1].itemsize if grouped else 0)
