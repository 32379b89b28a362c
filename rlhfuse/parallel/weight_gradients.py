"""Weight gradients of linear layers, added to the float32 gradient by the product that computes them.

Megatron's backward leaves this to Apex's extension. Where that is not installed, torch's product with a float32 sum
stands in its place. Otherwise a gradient is written in 16 bits, read and added: 10 bytes a weight and micro-batch.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [M, N] float32 += a [M, K] @ b [K, N], summed in float32 whatever `a` and `b` are."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # only CUDA has 16-bit products that end in float32
        total += a.float() @ b.float()


class TorchProducts:
    """What Megatron calls of Apex's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x_TK: Tensor, gradient_TN: Tensor, main_grad_NK: Tensor) -> None:
        add_product(main_grad_NK, gradient_TN.t(), x_TK)


def fuse_accumulation(model: torch.nn.Module) -> None:
    """Let linear layers whose weights have a `main_grad` add to it in their backward.

    It rounds once less than they do without; micro-batches are added in the same order.
    """
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = TorchProducts
    for part in model.modules():
        if isinstance(part, layers.ColumnParallelLinear | layers.RowParallelLinear):
            part.gradient_accumulation_fusion = True
