"""A model's whole weights in rank 0's host memory, one at a time, from the layout that it trains in.

No rank needs device memory for that. Values travel over gloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.decisions.shards import Shard
from rlhfuse.parallel.collectives import all_gather_objects
from rlhfuse.parallel.reshard import located_shards


class _Part(NamedTuple):
    """What one rank has of a weight: along `dim` the indices of its shard."""

    shard: Shard
    dim: int
    shape: torch.Size
    dtype: torch.dtype


class WholeWeights(Mapping[str, Tensor]):
    """The weights of a model by their names over the whole of it. Each read is a collective of all ranks.

    So all read the same names in the same order. Rank 0 gets values; the others get tensors of the `meta` device, with
    which they can run whatever code it is that reads.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        """`chunks`: this rank's of the model; a collective. The weights may change until they are read."""
        self._rank, self._mine = dist.get_rank(), located_shards(chunks)
        mine = [_Part(here.shard, here.dim, here.weight.shape, here.weight.dtype) for here in self._mine.values()]
        self._parts: dict[str, list[_Part]] = {}
        for part in (part for parts in all_gather_objects(mine) for part in parts):
            kept = self._parts.setdefault(part.shard.tensor, [])
            if part.shard.segments not in (other.shard.segments for other in kept):  # else another replica's
                kept.append(part)

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        dim, shape = parts[0].dim, list(parts[0].shape)
        shape[dim] = max(stop for part in parts for _, stop in part.shard.segments)
        whole = torch.empty(shape, dtype=parts[0].dtype, device="meta" if self._rank else "cpu")
        for part in parts:
            if (values := self._values(part)) is None:
                continue
            for start, stop in part.shard.segments:
                own = values.narrow(dim, part.shard.offset(start), stop - start)
                whole.narrow(dim, start, stop - start).copy_(own)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _values(self, part: _Part) -> Tensor | None:
        """The part on rank 0, which its owner sends; None elsewhere."""
        owner = part.shard.rank
        if self._rank == 0 != owner:
            received = torch.empty(part.shape, dtype=part.dtype)
            dist.recv(received, owner)
            return received
        if self._rank != owner:
            return None
        own = self._mine[part.shard.tensor].weight.data.cpu().contiguous()
        if self._rank == 0:
            return own
        dist.send(own, 0)
        return None
