"""The two outputs of a model: a scalar per token, or log-probabilities over a vocabulary cut over tensor ranks.

Shapes: T packed tokens, V vocabulary rows of this tensor rank, R selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlhfuse.models.layers.operations import operations_for
from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, VocabularyShard
from rlhfuse.models.logprobs.linear_loss import LinearLoss, TokenLoss


class ScalarHead(torch.nn.Module):
    """One number per token from the final hidden state; whole on every tensor rank, no bias.

    Under sequence parallelism the rows of the tensor ranks `shards` are gathered first: all compute all values.
    """

    def __init__(
        self,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        shards: dist.ProcessGroup | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        super().__init__()
        self._shards, self._linear = shards, operations_for(device).linear
        place = torch.device("cpu") if on_host else device  # of the weight, for now
        self.weight = torch.nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=place))

    def forward(
        self, x_T1H: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T, 1, H] -> ([T, 1, 1] in float32, None); the signature is that of Megatron's output layer."""
        if self._shards is not None:
            x_T1H = gather_from_sequence_parallel_region(x_T1H, tensor_parallel_output_grad=False, group=self._shards)
        return self._linear(x_T1H.float(), self.weight.float()), None


class VocabularyHead(torch.nn.Module):
    """Megatron's output layer slot, which only lets the hidden state through: its product is `LanguageOutput`'s.

    `weight` [V, H] is this tensor rank's part, None where it is the embedding's. Under sequence parallelism the rows
    of the tensor ranks are gathered.
    """

    def __init__(self, weight: torch.nn.Parameter | None, tp_group: dist.ProcessGroup, gathers: bool) -> None:
        super().__init__()
        self.weight, self.tp_group, self.gathers = weight, tp_group, gathers

    def forward(
        self, x_T1H: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T, 1, H] -> ([T, 1, H], None); the signature is that of Megatron's output layer."""
        if self.gathers:
            x_T1H = gather_from_sequence_parallel_region(x_T1H, tensor_parallel_output_grad=True, group=self.tp_group)
        return x_T1H, None


@dataclass(frozen=True)
class LanguageOutput:
    """What a language model's last stage gives out: the final hidden state, to be multiplied where it is asked for."""

    hidden_TH: Tensor
    weight_VH: Tensor
    head: VocabularyHead

    def logprobs(
        self, rows: Tensor | slice, targets_R: Tensor, vocab: int, temperature: float, entropy_graph: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target at `rows` and the entropy there, [R] float32 each, after temperature.

        Ids from `vocab` on are padding and take no part. Differentiable where logits are a whole tensor, the entropy
        only with `entropy_graph`.
        """
        x_RH, shard = self._inputs(rows, vocab)
        if by_tiles(x_RH.device):
            logprobs, entropy = LinearLogprobs(self.weight_VH, targets_R, shard, temperature).of(x_RH)
            return logprobs, entropy
        logits_RV = operations_for(x_RH.device).linear(x_RH, self.weight_VH)
        return token_logprobs(logits_RV, targets_R, shard, temperature, entropy_graph)

    def loss(
        self,
        loss: TokenLoss,
        rows: Tensor | slice,
        targets_R: Tensor,
        vocab: int,
        temperature: float,
        *,
        entropy_graph: bool = False,
        by_token: bool = True,
    ) -> Tensor:
        """`loss` of the outputs of `logprobs`. On GPUs also computes all gradients, so the incoming gradient must be 1;
        with `by_token`, a sum over tokens, `loss` is called for one chunk of tokens at a time."""
        weight: Any = self.weight_VH
        if not (by_tiles(weight.device) and torch.is_grad_enabled()):
            logprobs = self.logprobs(rows, targets_R, vocab, temperature, entropy_graph)
            return loss(*logprobs, slice(None))
        x_RH, shard = self._inputs(rows, vocab)
        total = weight.main_grad
        if self.head.weight is None:  # the embedding's too, whose gradients come in backwards
            if getattr(weight, "head_grad", None) is None:
                weight.head_grad = torch.zeros_like(total)
            total = weight.head_grad  # so that no sum depends on how forwards and backwards alternate
        softmax = LinearLogprobs(weight.detach(), targets_R, shard, temperature)
        return LinearLoss(loss, softmax, entropy_graph, by_token).of(x_RH, total)

    def _inputs(self, rows: Tensor | slice, vocab: int) -> tuple[Tensor, VocabularyShard]:
        """The selected hidden states [R, H], and the rows of the weight that this tensor rank holds."""
        x_RH = self.hidden_TH[rows] if isinstance(rows, slice) else self.hidden_TH.index_select(0, rows)
        group = self.head.tp_group
        if not self.head.gathers:  # whose backward sums over tensor ranks
            x_RH = copy_to_tensor_model_parallel_region(x_RH, group)
        return x_RH, VocabularyShard.of(self.weight_VH, vocab, group)


def by_tiles(device: torch.device) -> bool:
    """True if logits are computed in chunks; on CPU they are one tensor, with the same bits as in generation."""
    return device.type != "cpu"


def token_logprobs(
    logits_RV: Tensor, targets_R: Tensor, shard: VocabularyShard, temperature: float, entropy_graph: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy, [R] float32 each, after temperature; padding takes no part."""
    logits, tp_group = (logits_RV.float() / temperature)[:, : shard.columns], shard.group
    local = targets_R - shard.start
    inside = (local >= 0) & (local < shard.columns)
    if dist.get_world_size(tp_group) == 1:
        log_probs = torch.log_softmax(logits, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_graph):
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_probs.gather(1, targets_R[:, None])[:, 0], entropy
    with torch.no_grad():
        largest = logits.max(dim=-1).values if shard.columns else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp_group)
    total = reduce_from_tensor_model_parallel_region((logits - largest[:, None]).exp().sum(dim=-1), tp_group)
    log_total = total.log() + largest
    picked = logits.gather(1, local.clamp(0, max(shard.columns - 1, 0))[:, None])[:, 0] * inside
    target_logits = reduce_from_tensor_model_parallel_region(picked, tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_graph):
        # The normaliser enters every rank's own terms, so its gradient is the sum over ranks.
        shared = copy_to_tensor_model_parallel_region(log_total, tp_group)
        centred = logits - shared[:, None]
        entropy = -reduce_from_tensor_model_parallel_region((centred.exp() * centred).sum(dim=-1), tp_group)
    return target_logits - log_total, entropy
