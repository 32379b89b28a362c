"""A model's tensors on this rank, as references: what is read in place is never copied.

Knows nothing of how they are multiplied, nor of the names they came under.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer's tensors: references, never copies."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    proj: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor is not None]


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """All tensors of one rank. `embedding` and `output` hold its share of the vocabulary's rows."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Tensor

    def addresses(self) -> tuple[int, ...]:
        """Where the numbers lie. Equal addresses: the same memory, though its values may be new."""
        tensors = [self.embedding, self.final_norm, self.output, *(t for layer in self.layers for t in layer.tensors())]
        return tuple(tensor.data_ptr() for tensor in tensors)
