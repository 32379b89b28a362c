"""Transformer Engine's layers in a decoder layer, where it is installed: linear layers, norms and packed attention.

Its unfused modules, whose weights have the names and shapes of the local ones: whatever loads, moves, saves or exports
weights sees no difference. Megatron-core wraps them; what they call extra state is for 8-bit numbers, and not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfuse.models.layers.rotation import RotaryTables, rotate_packed


class LayerSlots(NamedTuple):
    """What stands in Megatron's slots of a decoder layer: classes, or specs of them."""

    column: Any  # linear layers cut by rows of the weight, ColumnParallelLinear's arguments
    row: Any  # by its columns
    norm: Any
    attention: Any  # of packed queries, keys and values that are not turned yet


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
