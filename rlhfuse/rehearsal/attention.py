"""What attention kernels hold on a GPU, for those that a CPU build of torch would replace by other operators.

torch chooses a kernel of scaled_dot_product_attention by device and has none for CUDA here; fake tensors would take
the one that writes out all scores. The flash kernel's operator has shapes for fake tensors, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def attend_as_flash(mode: Any) -> Callable[..., Tensor]:
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
