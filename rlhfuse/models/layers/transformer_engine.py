"""Transformer Engine's layers in a decoder layer, where it is installed: linear layers, norms and packed attention.

Its unfused modules, whose weights have the names and shapes of the local ones: whatever loads, moves, saves or exports
weights sees no difference. Megatron-core wraps them; what they call extra state is for 8-bit numbers, and not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfuse.base.cuda_environment import import_obstacle
from rlhfuse.base.errors import InputError
from rlhfuse.models.layers.rotation import RotaryTables, rotate_packed

WIDEST_HEAD = 256
# Ours add weight gradients to float32 sums in their products, and split backwards; these have not been timed yet.
NOT_MEASURED = "trainer.transformer_impl=transformer_engine takes others, which have not been measured beside them"


class LayerSlots(NamedTuple):
    """What stands in Megatron's slots of a decoder layer: classes, or specs of them."""

    column: Any  # linear layers cut by rows of the weight, ColumnParallelLinear's arguments
    row: Any  # by its columns
    norm: Any
    attention: Any  # of packed queries, keys and values that are not turned yet


@dataclass(frozen=True)
class ChosenLayers:
    """Whose layers train and score."""

    transformer_engine: bool = False
    passed_over: str = ""  # why not Transformer Engine's, where that was open

    def line(self) -> str:
        if self.transformer_engine:
            return "layers of training and scoring: Transformer Engine's"
        return f"layers of training and scoring: our own ({self.passed_over})" if self.passed_over else ""


def choose_layers(wanted: str, device: str, dtype: str, head_dims: Iterable[int]) -> ChosenLayers:
    """Transformer Engine's where they are `wanted`, for models of these head dimensions; auto takes our own.

    Raises InputError where they are wanted and cannot serve.
    """
    if wanted == "local" or (wanted == "auto" and device == "cpu"):
        return ChosenLayers()
    reason = obstacle(device, dtype, head_dims)
    if wanted == "auto":
        return ChosenLayers(passed_over=reason or NOT_MEASURED)
    if reason:
        raise InputError(f"trainer.transformer_impl={wanted}: {reason}; use auto or local")
    return ChosenLayers(transformer_engine=True)


def obstacle(device: str, dtype: str, head_dims: Iterable[int]) -> str:
    """Why Transformer Engine cannot serve; '' if it can."""
    if device == "cpu":
        return "Transformer Engine runs on CUDA alone"
    if broken := import_obstacle("transformer_engine.pytorch", "Transformer Engine"):
        return broken
    if dtype == "float32":
        return "Transformer Engine's packed attention computes in 16 bits, not in float32"
    if wrong := [dim for dim in head_dims if dim % 8 or dim > WIDEST_HEAD]:
        return f"Transformer Engine's attention takes a head_dim of multiples of 8 up to {WIDEST_HEAD}, not {wrong[0]}"
    return ""


def transformer_engine_slots(rotary: RotaryTables) -> LayerSlots:
    from megatron.core.extensions import transformer_engine as wrapped  # imports Transformer Engine, which takes long
    from megatron.core.transformer.spec_utils import ModuleSpec

    params = {"rotary": rotary, "attention": wrapped.TEDotProductAttention}
    attention = ModuleSpec(module=RotatedAttention, params=params)
    return LayerSlots(wrapped.TEColumnParallelLinear, wrapped.TERowParallelLinear, wrapped.TENorm, attention)


class RotatedAttention(torch.nn.Module):
    """Megatron's core-attention slot: q [T, heads, D] and k [T, kv_heads, D] are turned as everywhere in the project,
    and go with v to a module with the arguments of Megatron's TEDotProductAttention."""

    def __init__(self, *settings: Any, rotary: RotaryTables, attention: Any, **named: Any) -> None:
        super().__init__()
        self._rotary, self.attention = rotary, attention(*settings, **named)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, packed_seq_params: Any, **named: Any
    ) -> Tensor:
        """[T, heads * D]. Causal within each sequence; there is no mask to pass."""
        sequences = packed_seq_params.sequences
        tables = self._rotary.up_to(sequences.longest)
        query, key = (rotate_packed(x, tables, sequences.positions) for x in (query, key))
        return self.attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **named)
