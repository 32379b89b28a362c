"""Where a rank stands in generation and inference, which ranks act as one with it, and how it meets the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.kv_transfer import KVTransfer
from rlhfuse.gen.migration.peer_transfer import HeadPlan, receive_sequences, send_sequences
from rlhfuse.parallel.collectives import all_gather_objects
from rlhfuse.tasks.placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class RankPlace:
    """`rank` in the placement of all. A group may be None where it is of this rank alone.

    Whatever the ranks of an iteration exchange, they exchange here or through the `IterationStore`.
    """

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
    def spanned(self) -> tuple[int, ...]:
        """The instances that have ranks in its worker."""
        return self.placement.instances_under(self.worker)

    @property
    def decoders(self) -> TensorParallelGroup:
        """This rank's generation instance."""
        return TensorParallelGroup(self.placement.instances[self.instance], self.rank, self.instance_group)

    @property
    def scorers(self) -> TensorParallelGroup:
        """This rank's inference worker."""
        return TensorParallelGroup(self.placement.workers[self.worker], self.rank, self.worker_group)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order. A collective of all ranks."""
        return all_gather_objects(value)

    def send(self, transfer: KVTransfer, heads: HeadPlan, bucket_bytes: int) -> int:
        """As `send_sequences`, to the ranks that call `receive` with the same plan."""
        return send_sequences(transfer, heads, self.rank, bucket_bytes=bucket_bytes)

    def receive(self, engine: Engine, heads: HeadPlan, bucket_bytes: int) -> Sequence[int]:
        """As `receive_sequences`."""
        return receive_sequences(engine, heads, self.rank, bucket_bytes=bucket_bytes)
