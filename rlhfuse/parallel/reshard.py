"""Copies weights from one layout to another by the plan of decisions/weight_moves.py, over Megatron-core's transports.

    both layouts -> every rank computes the same plan -> bucket by bucket: send, receive, write

A rank holds one bucket at most beside both copies of the weights. Values are copied bit for bit. The transport is gloo
on CPU, NCCL on CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService, RecvOp
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.utils import ParameterMetadata, _build_layer_module_prefix_map, extract_param_metadata
from torch import Tensor

from rlhfuse.base.launcher import ranks_per_node
from rlhfuse.decisions.shards import Shard, tensor_segments
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.decisions.weight_moves import Transfer, in_buckets, plan_moves
from rlhfuse.parallel.device import Device


class _GlooTransport(GlooCopyService):
    """Megatron's gloo transport over the default group, without the CUDA stream and the second receive buffer."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.gloo_pg = None
        self.send_ops = []
        self.recv_ops = []
        self._copy_stream = None

    def submit_recv_with_id(self, task_id: int, dest_tensor: Tensor, src_rank: int) -> None:
        self.recv_ops.append((RecvOp(task_id, dest_tensor, src_rank), dest_tensor))


class _NcclTransport(NCCLCopyService):
    """Megatron's NCCL transport; its copies within a rank wait for the work that wrote the source weights."""

    def run(self) -> None:
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        super().run()


class LocatedShard(NamedTuple):
    """A shard on this rank together with its weight."""

    shard: Shard
    weight: Tensor
    dim: int

    def view(self, transfer: Transfer) -> Tensor:
        """The part of the weight that a transfer is about."""
        return self.weight.data.narrow(self.dim, self.shard.offset(transfer.start), transfer.stop - transfer.start)


class Route(NamedTuple):
    """What this rank has and wants of a model, and the transfers that it takes part in, by bucket."""

    sources: Mapping[str, LocatedShard]
    targets: Mapping[str, LocatedShard]
    buckets: list[list[Transfer]]


class Resharder:
    """Moves a model's weights between two built modules. Every rank of both layouts must call `reshard`."""

    def __init__(self, device: Device, bucket_bytes: int) -> None:
        self._service = _NcclTransport() if device.is_cuda else _GlooTransport()
        self._ranks_per_node = ranks_per_node() or dist.get_world_size()
        self._bucket_bytes = bucket_bytes
        self._routes: weakref.WeakKeyDictionary[torch.nn.Module, Route] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def reshard(
        self, source: Iterable[torch.nn.Module], destination: torch.nn.Module, has: WeightHolders, wants: WeightHolders
    ) -> None:
        """Copy a model's weights into `destination`'s parameters, whatever the layouts.

        `source`: this rank's chunks of the model, one where it is not interleaved. `has`, `wants`: the ranks that hold
        each part in both layouts. The first move into `destination` makes the plan, which later ones repeat.
        `destination` must have its memory whenever it is called. Raises ValueError for modules of other layouts.
        """
        if destination not in self._routes:
            shards = located_shards(source), located_shards([destination])
            self._routes[destination] = self._plan(*shards, has, wants)
        route = self._routes[destination]
        for bucket in route.buckets:
            self._run(bucket, route.sources, route.targets)

    def _plan(
        self,
        sources: Mapping[str, LocatedShard],
        targets: Mapping[str, LocatedShard],
        has: WeightHolders,
        wants: WeightHolders,
    ) -> Route:
        rank = dist.get_rank()
        buckets = in_buckets(plan_moves(has, wants, self._ranks_per_node), self._bucket_bytes)
        own = [[transfer for transfer in bucket if rank in (transfer.source, transfer.target)] for bucket in buckets]
        planned = sum(transfer.bytes for bucket in own for transfer in bucket if transfer.target == rank)
        if planned != (held := sum(located.shard.bytes for located in targets.values())):
            raise ValueError(f"rank {rank} holds {held} bytes of a copy whose layout gives it {planned}")
        return Route(sources, targets, own)

    def _run(
        self, bucket: Sequence[Transfer], sources: Mapping[str, LocatedShard], targets: Mapping[str, LocatedShard]
    ) -> None:
        """This rank's part of one bucket. Both ends of a pair post in the order of the bucket."""
        rank = dist.get_rank()
        staged: list[tuple[Tensor, Tensor]] = []
        for task, transfer in enumerate(bucket):
            if transfer.source == rank:
                view = (targets if transfer.forwarded else sources)[transfer.tensor].view(transfer)
                sent = view if transfer.target == rank else view.contiguous()
                self._service.submit_send_with_id(task, sent, transfer.target)
            if transfer.target == rank:
                view = targets[transfer.tensor].view(transfer)
                if transfer.source != rank and not view.is_contiguous():  # what is one stretch is received right there
                    buffer = torch.empty(view.shape, dtype=view.dtype, device=view.device)
                    staged.append((view, buffer))
                    view = buffer
                self._service.submit_recv_with_id(task, view, transfer.source)
        self._service.run()
        for view, buffer in staged:
            view.copy_(buffer)


def located_shards(chunks: Iterable[torch.nn.Module]) -> dict[str, LocatedShard]:
    """This rank's shards of a model, by the weights' names over the whole model. Reads no values."""
    rank, shards = dist.get_rank(), {}
    for chunk in chunks:
        module: Any = getattr(chunk, "module", chunk)
        layers = _build_layer_module_prefix_map(module)
        groups = ProcessGroupCollection(tp=module.pg_collection.tp, dp=module.pg_collection.dp)
        for name, weight in module.named_parameters():
            facts = extract_param_metadata(weight, name, rank, groups, layer_module_prefix_map=layers)
            shards[facts.resolved_name] = _locate(facts, weight, rank)
    return shards


def _locate(facts: ParameterMetadata, weight: Tensor, rank: int) -> LocatedShard:
    assert facts.resolved_name is not None, "located_shards resolves names"
    dim = facts.partition_dim if facts.is_tp else 0
    rows = facts.shape[dim]
    row_bytes = weight.numel() // rows * weight.element_size()
    group, stride = [rank], 1
    if facts.is_tp:
        group, stride = facts.tensor_parallel_group_ranks, facts.partition_stride
        assert group is not None, "a tensor-parallel weight has a group"
    segments = tensor_segments(rows * len(group), stride, group.index(rank), len(group))
    return LocatedShard(Shard(facts.resolved_name, rank, segments, row_bytes), weight, dim)
