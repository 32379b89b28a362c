"""Selective recomputation: inputs of linear layers that are let go after their product and made again for the backward.

A layer needs its input once more, for its weight's gradient. Where a norm or SwiGLU made it, what it is made of is kept
for theirs anyway: the same operation on it has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def remake_inputs(decoder_layer: Any) -> None:
    """Let go of the inputs of a layer's qkv, fc1 and fc2 between forward and backward."""
    attention, mlp = decoder_layer.self_attention, decoder_layer.mlp
    RemadeInput(decoder_layer.input_layernorm, attention.linear_qkv)
    RemadeInput(decoder_layer.pre_mlp_layernorm, mlp.linear_fc1)
    RemadeInput(mlp.activation_func, mlp.linear_fc2)


class RemadeInput:
    """Stands in for the product of one of Megatron's linear layers, whose input comes from `maker` and goes to no
    other."""

    def __init__(self, maker: torch.nn.Module, linear: Any) -> None:
        self._maker, self._product = maker, linear._forward_impl
        self._made_of: Tensor | None = None
        maker.register_forward_pre_hook(self._note)
        linear._forward_impl = self._forward

    def _note(self, _: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        self._made_of = inputs[0].detach() if torch.is_grad_enabled() else None

    def _forward(self, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        """Megatron's arguments."""
        out = self._product(input=input, weight=weight, **settings)
        made_of, self._made_of = self._made_of, None
        if made_of is not None:
            kept = [(input, made_of)]  # popped: hooks live until the whole graph has run
            out.register_hook(lambda _: self._fill(*kept.pop()))
            for held in (input, input._base):  # the graph keeps this very tensor, and a view's base has its storage too
                if held is not None:
                    held.data = held.new_empty(0)  # a storage that numpy saw cannot be resized
        return out

    @torch.no_grad()
    def _fill(self, input: Tensor, made_of: Tensor) -> None:
        input.data = self._maker.forward(made_of)
