"""Products that end in float32 whatever goes in: of logits, and of weights' gradients, which add to float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, summed and given out in it whatever the inputs are."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # only CUDA has 16-bit products that end in float32


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [M, N] float32 += a [M, K] @ b [K, N], summed in float32 whatever `a` and `b` are."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += product(a, b)
