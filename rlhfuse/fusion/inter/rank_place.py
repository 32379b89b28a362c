"""Where a rank stands in generation and inference, and which ranks act as one with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rlhfuse.decisions.placement import Placement
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup


@dataclass(frozen=True)
class RankPlace:
    """`rank` in the placement of all. A group may be None where it is of this rank alone."""

    rank: int
    placement: Placement
    instance_group: dist.ProcessGroup | None  # the ranks of its generation instance
    worker_group: dist.ProcessGroup | None  # the ranks of its inference worker

    @property
    def instance(self) -> int:
        return self.placement.instance_of(self.rank)

    @property
    def worker(self) -> int:
        return self.placement.worker_of(self.rank)

    @property
    def decoders(self) -> TensorParallelGroup:
        """This rank's generation instance."""
        return TensorParallelGroup(self.placement.instances[self.instance], self.rank, self.instance_group)

    @property
    def scorers(self) -> TensorParallelGroup:
        """This rank's inference worker."""
        return TensorParallelGroup(self.placement.workers[self.worker], self.rank, self.worker_group)
