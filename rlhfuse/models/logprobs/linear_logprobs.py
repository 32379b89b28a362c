"""Log-probabilities and entropies straight from hidden states: of the logits only those of some rows exist at a time.

Letters: R rows, H hidden, V weight rows of this tensor rank, C rows of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.models.logprobs.tile_sums import tile_sums
from rlhfuse.parallel.weight_gradients import product

LOWEST = -1e30  # of no logit: finite, because it is multiplied by zero
LOGITS_BYTES = 256 << 20  # of logits at a time, in float32


@dataclass(frozen=True)
class VocabularyShard:
    """Which tokens the weight rows of this tensor rank are; rows from `columns` on are padding and take no part."""

    start: int
    columns: int
    group: dist.ProcessGroup

    @staticmethod
    def of(weight: Tensor, vocab: int, group: dist.ProcessGroup) -> VocabularyShard:
        start = dist.get_rank(group) * len(weight)
        return VocabularyShard(start, min(max(vocab - start, 0), len(weight)), group)


@dataclass(frozen=True)
class LinearLogprobs:
    """Log-probabilities of `targets` [R] and the entropies, of softmax(x weight^T / temperature), without a graph."""

    weight_VH: Tensor
    targets_R: Tensor
    shard: VocabularyShard
    temperature: float
    most_bytes: int = LOGITS_BYTES

    @torch.no_grad()
    def of(self, x_RH: Tensor) -> Tensor:
        """Log-probabilities and entropies, [2, R] float32."""
        parts = [self.part(x_RH[rows], self.columns(rows))[2] for rows in self.parts(len(x_RH))]
        return torch.cat(parts, dim=1)

    def parts(self, rows: int) -> Iterator[slice]:
        """Rows whose logits are there at a time."""
        return slices(rows, 4 * len(self.weight_VH), self.most_bytes)

    def columns(self, rows: slice) -> Tensor:
        """Which column of this tensor rank's logits each target is; others are other ranks'."""
        return self.targets_R[rows] - self.shard.start

    def part(self, x_CH: Tensor, columns_C: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Logits in float32 (None: of padding alone), logarithms of the softmax's denominators [C], outputs [2, C]."""
        if not self.shard.columns:
            none = torch.tensor([[LOWEST], [0.0], [0.0], [0.0]], device=x_CH.device).expand(4, len(x_CH))
            return None, *over_ranks(none, self.shard.group)
        logits = product(x_CH, self.weight_VH[: self.shard.columns].t())
        return logits, *over_ranks(tile_sums(logits, columns_C, self.temperature), self.shard.group)


def slices(rows: int, row_bytes: int, most_bytes: int) -> Iterator[slice]:
    """Slices of nearly as many rows each, at least one; the same on all tensor ranks, which meet in each."""
    rows = max(rows, 1)
    step = -(-rows // -(-rows // max(most_bytes // row_bytes, 1)))
    return (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def over_ranks(sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All tensor ranks' sums [4, R]: logarithm of the softmax's denominator [R]; log-probability and entropy [2, R]."""
    top, total, moment, picked = sums
    if dist.get_world_size(group) > 1:
        top = top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shrink = (sums[0] - top).exp()
        rest = torch.stack([total * shrink, (moment + (sums[0] - top) * total) * shrink, picked])
        dist.all_reduce(rest, group=group)
        total, moment, picked = rest
    below = total.log()
    log_total = below + top
    return log_total, torch.stack([picked - log_total, below - moment / total])
