"""Weight gradients of linear layers: added to the float32 gradient by their products, or computed later.

Megatron's backward leaves the first to Apex's extension. Where that is not installed, torch's product with a float32
sum stands in its place. Otherwise a gradient is written in 16 bits, read and added: 10 bytes a weight and micro-batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor

from rlhfuse.base.errors import InputError

ENGINES_FUSION = "fuse_wgrad_accumulation"  # asked at every forward
LINEAR = layers.ColumnParallelLinear | layers.RowParallelLinear


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


class TorchProducts:
    """What Megatron calls of Apex's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x_TK: Tensor, gradient_TN: Tensor, main_grad_NK: Tensor) -> None:
        add_product(main_grad_NK, gradient_TN.t(), x_TK)


def fuse_accumulation(model: torch.nn.Module) -> None:
    """Let linear layers whose weights have a `main_grad` add to it in their backward, Transformer Engine's too.

    It rounds once less than they do without; micro-batches are added in the same order. Raises InputError for layers
    that cannot.
    """
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = TorchProducts
    for part in model.modules():
        if isinstance(part, LINEAR):
            part.gradient_accumulation_fusion = True
        elif getattr(part, "parallel_mode", None):  # Transformer Engine's; Megatron gives them the same at their making
            if not hasattr(part, ENGINES_FUSION):
                raise InputError(
                    f"Transformer Engine's {type(part).__name__} has no {ENGINES_FUSION}: sums would stay apart; "
                    "install another version or set trainer.transformer_impl=local"
                )
            setattr(part, ENGINES_FUSION, True)


class KeptProduct(NamedTuple):
    """What the weight gradient of a layer is made of."""

    layer: Any
    x: Tensor  # [T, 1, K] its input; under sequence parallelism of a layer cut by rows [T/tp, 1, K]
    gradient: Tensor  # [T, 1, N] of its output


class DeferredProducts:
    """Puts off the weight gradients of a model's linear layers: while `on`, their backwards leave them in `kept`.

    Megatron's layers can do so with the output layer's, by a buffer for gradients of outputs; all of them get one here.
    Norms, biases, embeddings and heads are small, or made in one go with their input's gradient, and not put off.
    Cutting autograd's graph, as torch's pipelines do, would run both products of a layer and keep the whole graph.
    Raises InputError where the layers are not Megatron's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.on = False
        self.kept: list[KeptProduct] = []
        parts: list[Any] = [part for part in model.modules() if isinstance(part, LINEAR)]
        if not parts:
            raise InputError("a split backward needs Megatron's linear layers; set trainer.transformer_impl=local")
        for part in parts:
            part._forward_impl = partial(self._forward, part, part._forward_impl)

    def _forward(self, layer: Any, product: Any, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        """Megatron's arguments."""
        if self.on:
            kept = _OutputGradient(self.kept, layer, input)
            settings |= dict(gradient_accumulation_fusion=True, grad_output_buffer=kept, wgrad_deferral_limit=0)
        return product(input=input, weight=weight, **settings)

    def take(self) -> list[KeptProduct]:
        """What the last backward kept."""
        kept, self.kept[:] = self.kept[:], ()
        return kept


class _OutputGradient:
    """The buffer of one layer and micro-batch, which Megatron appends to."""

    def __init__(self, kept: list[KeptProduct], layer: Any, x: Tensor) -> None:
        self._kept, self._layer, self._x = kept, layer, x

    def append(self, gradient: Tensor) -> None:
        """The input is there now, if it was let go meanwhile."""
        self._kept.append(KeptProduct(self._layer, self._x.detach(), gradient))


@torch.no_grad()
def add_products(kept: list[KeptProduct]) -> None:
    """Add the weight gradients to `main_grad`, as the layers' own backward does, and let go of what they are made of.

    Under sequence parallelism the input of the next product is gathered meanwhile.
    """
    gathered = _start_gather(kept[0]) if kept else None
    while kept:
        layer, x, gradient = kept.pop(0)
        if gathered is not None:
            work, x = gathered
            work.wait()
        gathered = _start_gather(kept[0]) if kept else None
        gradient, x = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if layer.gradient_accumulation_fusion:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, gradient, layer.weight.main_grad)
        else:
            layer.weight.main_grad.add_(gradient.t().matmul(x))


def _start_gather(product: KeptProduct) -> tuple[Any, Tensor] | None:
    """The input's parts of all tensor ranks, where the layer takes them together."""
    x, group = product.x, product.layer.tp_group
    if not (isinstance(product.layer, layers.ColumnParallelLinear) and product.layer.sequence_parallel):
        return None
    whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    return dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True), whole
