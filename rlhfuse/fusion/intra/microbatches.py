"""The micro-batches of a pipeline in one step, cut and sent to the device as the program comes to them.

While a device computes what was launched before, the host cuts what it launches next. Their sizes are known at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfuse.base.remembered import remembered
from rlhfuse.models.stage import Outbox, PackedTokens, padded_rows
from rlhfuse.ppo.rollout import RolloutBatch

LOOKED_UP = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "high_entropy")  # by losses, by token


@dataclass(frozen=True)
class Microbatch:
    """Samples on the device, N of T tokens, and what the losses look up of their C response tokens that count."""

    packed: PackedTokens
    lengths: Tensor  # int64 [N]: how many of each sample count
    predictions: Tensor  # int64 [C]: positions whose outputs predict these tokens
    targets: Tensor  # int64 [C]: the tokens
    samples: RolloutBatch  # of which LOOKED_UP is on the device, of these tokens alone

    @staticmethod
    def of(batch: RolloutBatch, device: torch.device, shards: int, outbox: Outbox) -> Microbatch:
        """From samples in host memory: on a GPU an index that is computed there would stop the queue."""
        kept = _looked_up(batch)
        others = [batch.prediction_index, batch.tokens[batch.response_index], *kept.values()]
        if batch.counted is not None:
            others = [array[batch.counted] for array in others]
        packed, (lengths, predictions, targets, *arrays) = PackedTokens.beside(
            [batch.counted_lengths, *others], batch.tokens, batch.cu_seqlens, device, shards, outbox
        )
        return Microbatch(packed, lengths, predictions, targets, batch.with_fields(**dict(zip(kept, arrays))))


class Microbatches:
    """Those of one pipeline: `parts` of a mini-batch in host memory. A micro-batch stays as long as this object."""

    def __init__(
        self,
        batch: RolloutBatch,
        parts: Sequence[Sequence[int]],
        device: torch.device,
        shards: int,
        outbox: Outbox,
    ) -> None:
        """Takes from the `outbox` what all of them need: its pieces of the step before have arrived."""
        self._batch, self._parts, self._device, self._shards, self._outbox = batch, parts, device, shards, outbox
        lengths = batch.lengths.tolist()
        rows = (sum(lengths[sample] for sample in part) for part in parts)
        self.rows = tuple(padded_rows(count, device, shards) for count in rows)  # tokens of each, with padding
        if device.type == "cuda":
            outbox.empty(sum(map(self._bytes, range(len(parts)))))

    @remembered
    def __getitem__(self, number: int) -> Microbatch:
        return Microbatch.of(self._batch.select(self._parts[number]), self._device, self._shards, self._outbox)

    def packed(self, number: int) -> PackedTokens:
        return self[number].packed

    def _bytes(self, number: int) -> int:
        """Bound what a micro-batch sends: tokens, positions, borders, places, lengths, ids, what is looked up."""
        part = list(self._parts[number])
        responses, width = int(self._batch.response_lengths[part].sum()), 2 * 8
        width += sum(array.itemsize for array in _looked_up(self._batch).values())
        sizes = 4 * (len(part) + 2) + 8 * len(part)
        return 2 * 8 * self.rows[number] + sizes + width * responses + Outbox.MOST_DTYPES * Outbox.ALIGNMENT


def _looked_up(batch: RolloutBatch) -> dict[str, Tensor]:
    return {name: array for name in LOOKED_UP if (array := getattr(batch, name)) is not None}
