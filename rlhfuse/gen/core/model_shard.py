"""One rank's share of a model: its tensors as references, and the sums and gathers over the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.config.layer_weights import layer_weights
from rlhfuse.config.spec import ModelSpec

Array = TypeVar("Array")


@dataclass(frozen=True, eq=False)
class LayerWeights(Generic[Array]):
    """One decoder layer's weights, as tensors or arrays: references, never copies; by Megatron-core's names."""

    input_layernorm: Array
    linear_qkv: Array
    linear_proj: Array
    pre_mlp_layernorm: Array
    linear_fc1: Array
    linear_fc2: Array
    linear_qkv_bias: Array | None = None
    q_layernorm: Array | None = None
    k_layernorm: Array | None = None
    linear_proj_bias: Array | None = None


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """All tensors of one rank. `embedding` and `output` hold its share of the vocabulary's rows."""

    embedding: Tensor
    layers: tuple[LayerWeights[Tensor], ...]
    final_norm: Tensor
    output: Tensor

    @staticmethod
    def take(
        weights: Mapping[str, Tensor], spec: ModelSpec, tp: int, dtype: torch.dtype, device: torch.device
    ) -> ModelWeights:
        """A rank's share, one of `tp`, by Megatron-core names. Raises InputError naming a missing or ill-shaped one."""

        def take(name: str, *shape: int) -> Tensor:
            if name not in weights:
                raise InputError(f"weights lack {name}; give one tensor for each name of this model")
            tensor = weights[name].detach()
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != device.type:
                raise InputError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}, "
                    f"but {dtype} {list(shape)} on {device.type} is needed (tp={tp})"
                )
            return tensor

        embedding = "embedding.word_embeddings.weight"
        rows = weights[embedding].shape[0] if embedding in weights else 0
        if embedding in weights and rows * tp < spec.vocab:
            raise InputError(f"{embedding} has {rows} rows on each of {tp} ranks, vocab is {spec.vocab}")

        def layer(number: int) -> LayerWeights:
            held = {}
            for weight in layer_weights(spec):
                field = weight.name.removesuffix(".weight").replace(".bias", "_bias").rpartition(".")[2]
                held[field] = take(f"decoder.layers.{number}.{weight.name}", *weight.shape(tp))
            return LayerWeights(**held)

        embedding_weight = take(embedding, rows, spec.hidden)
        layers = [layer(number) for number in range(spec.layers)]
        final_norm = take("decoder.final_layernorm.weight", spec.hidden)
        output = embedding_weight if spec.tied_embeddings else take("output_layer.weight", rows, spec.hidden)
        return ModelWeights(embedding_weight, tuple(layers), final_norm, output)

    def addresses(self) -> tuple[int, ...]:
        """Where the numbers lie. Equal addresses: the same memory, though its values may be new."""
        of_layers = (weight for layer in self.layers for weight in vars(layer).values())
        tensors = (self.embedding, self.final_norm, self.output, *of_layers)
        return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)


class TensorParallel:
    """Sums and gathers over a tensor-parallel group, which stays the caller's; with one rank (None) they do nothing."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def sum(self, x: Tensor) -> Tensor:
        """All ranks' sum, written over x."""
        if self.size == 1:
            return x
        if x.is_cuda:
            dist.all_reduce(x, group=self.group)
            return x
        parts = self._all_gather(x)  # added in rank order, so that an element's bits do not depend on its position
        x.copy_(parts[0])
        for part in parts[1:]:
            x += part
        return x

    def product_sum(self, x: Tensor, weight: Tensor) -> Tensor:
        """All ranks' sum of x @ weight.T: x [R, C], weight [H, C] -> [R, H], valid until the next one is asked for."""
        return self.sum(F.linear(x, weight))

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' columns side by side: x [R, C] -> [R, size * C]."""
        if self.size == 1:
            return x
        if not x.is_cuda:
            return torch.cat(self._all_gather(x), dim=-1)
        whole = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole.transpose(0, 1).flatten(1)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of the whole embedding, of which `table` is this rank's share; other ranks' rows count as zero."""
        if self.size == 1:
            return F.embedding(tokens, table)
        local = tokens - self.rank * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        return self.sum(F.embedding(local.where(mine, 0), table) * mine[:, None])

    def first(self, number: int) -> int:
        """The number of the group's first rank, of 64 bits; a collective."""
        if self.group is None or self.size == 1:
            return number
        told = torch.tensor([number])
        dist.broadcast(told, group=self.group, group_src=0)
        return int(told)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
