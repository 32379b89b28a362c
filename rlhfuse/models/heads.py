"""The two outputs of a model: a scalar per token, or log-probabilities from vocabulary-parallel logits.

Shapes: T packed tokens, V vocabulary rows of this tensor rank, R selected positions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlhfuse.models.operations import operations_for


class ScalarHead(torch.nn.Module):
    """One number per token from the final hidden state; whole on every tensor rank, no bias.

    Under sequence parallelism the rows of the tensor ranks `shards` are gathered first: all compute all values.
    """

    def __init__(
        self, hidden: int, dtype: torch.dtype, device: torch.device, shards: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self._shards, self._linear = shards, operations_for(device).linear
        self.weight = torch.nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=device))

    def forward(
        self, x_T1H: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T, 1, H] -> ([T, 1, 1] in float32, None); the signature is that of Megatron's output layer."""
        if self._shards is not None:
            x_T1H = gather_from_sequence_parallel_region(x_T1H, tensor_parallel_output_grad=False, group=self._shards)
        return self._linear(x_T1H.float(), self.weight.float()), None


def token_logprobs(
    logits_RV: Tensor, targets_R: Tensor, vocab: int, temperature: float, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy, [R] float32 each, after temperature; padding takes no part."""
    rank, size, part = dist.get_rank(tp_group), dist.get_world_size(tp_group), logits_RV.shape[1]
    start = rank * part
    logits = logits_RV.float() / temperature
    if start + part > vocab:
        logits = logits[:, : max(vocab - start, 0)]
    local = targets_R - start
    inside = (local >= 0) & (local < logits.shape[1])
    if size == 1:
        log_probs = torch.log_softmax(logits, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_probs.gather(1, targets_R[:, None])[:, 0], entropy
    with torch.no_grad():
        largest = logits.max(dim=-1).values if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp_group)
    total = reduce_from_tensor_model_parallel_region((logits - largest[:, None]).exp().sum(dim=-1), tp_group)
    log_total = total.log() + largest
    picked = logits.gather(1, local.clamp(0, max(logits.shape[1] - 1, 0))[:, None])[:, 0] * inside
    target_logits = reduce_from_tensor_model_parallel_region(picked, tp_group)
    # The normaliser enters every rank's own terms, so its gradient is the sum over ranks.
    shared = copy_to_tensor_model_parallel_region(log_total, tp_group)
    centred = logits - shared[:, None]
    entropy = -reduce_from_tensor_model_parallel_region((centred.exp() * centred).sum(dim=-1), tp_group)
    return target_logits - log_total, entropy
