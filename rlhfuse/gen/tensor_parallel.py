"""Sums and gathers over the ranks that share one model; with one rank they do nothing.

On CPU a sum adds the ranks' parts in rank order, so that the bits of an element do not depend on its place; on CUDA
it is NCCL's. Knows nothing of layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class TensorParallel:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` None: one rank. The group stays the caller's."""
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def sum(self, x: Tensor) -> Tensor:
        """x, which all ranks' sum is written over."""
        if self.size == 1:
            return x
        if x.is_cuda:
            dist.all_reduce(x, group=self.group)
            return x
        parts = self._parts(x)
        x.copy_(parts[0])
        for part in parts[1:]:
            x += part
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' columns side by side: x [R, C] -> [R, size * C]."""
        if self.size == 1:
            return x
        if not x.is_cuda:
            return torch.cat(self._parts(x), dim=-1)
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

    def _parts(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
