"""One decoder layer as references to its weights, which Megatron's modules hold under their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfuse.models.stack.torch_ops import TorchOps


class Linear(NamedTuple):
    """A linear layer of one tensor rank: weight [N, K] and bias [N], if any; frozen ones get no gradient."""

    weight: Tensor
    bias: Tensor | None = None


class Mlp(NamedTuple):
    """The MLP of a layer, without its norm and the sum over tensor ranks; other MLPs implement these methods."""

    fc1: Linear
    fc2: Linear

    def forward(self, x: Tensor, ops: TorchOps, remade: bool) -> tuple[Tensor, list[Tensor | None]]:
        """(this tensor rank's part of the output [T, C], what `backward` needs, less what it makes again)."""
        gate_up = ops.linear(x, self.fc1.weight)
        y = ops.swiglu(gate_up)
        return ops.linear(y, self.fc2.weight), [gate_up, None if remade else y]

    def backward(
        self, gradient: Tensor, saved: list[Any], ops: TorchOps, product: Callable[[Linear, Tensor, Tensor], None]
    ) -> tuple[Linear, Tensor]:
        """(the linear layer that took x, the gradient of its output), of that of the output; empties `saved`.

        `product` takes linear layers with the gradients of their outputs and their inputs.
        """
        y, gate_up = saved.pop(), saved.pop()
        by_gate_up, y = ops.swiglu_backward(gate_up, torch.mm(gradient, self.fc2.weight), y)
        del gate_up
        product(self.fc2, gradient, y)
        return self.fc1, by_gate_up


class FlatLayer(NamedTuple):
    """The weights of one decoder layer."""

    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None  # [D] each, of queries and keys
    proj: Linear
    mlp_norm: Tensor
    mlp: Mlp

    @staticmethod
    def of(layer: Any) -> FlatLayer:
        """Those of Megatron's TransformerLayer."""
        attention, mlp = layer.self_attention, layer.mlp
        queries, keys = attention.q_layernorm, attention.k_layernorm
        norms = (queries.weight, keys.weight) if hasattr(queries, "weight") else None
        qkv, proj = (Linear(one.weight, one.bias) for one in (attention.linear_qkv, attention.linear_proj))
        halves = Mlp(Linear(mlp.linear_fc1.weight), Linear(mlp.linear_fc2.weight))
        return FlatLayer(layer.input_layernorm.weight, qkv, norms, proj, layer.pre_mlp_layernorm.weight, halves)
