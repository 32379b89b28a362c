"""Copies weights from one layout to another by the plan of decisions/weight_moves.py.

    both layouts -> every rank computes the same plan -> bucket by bucket: send, receive, write

A rank holds one bucket at most beside both copies of the weights. Values are copied bit for bit, over gloo on CPU and
NCCL on CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.utils import ParameterMetadata, _build_layer_module_prefix_map, extract_param_metadata
from torch import Tensor

from rlhfuse.base.launcher import ranks_per_node
from rlhfuse.decisions.shards import Shard, tensor_segments
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.decisions.weight_moves import Transfer, in_buckets, plan_moves
from rlhfuse.parallel.device import Device


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
    """Moves a model's weights between two built modules. Every rank of both layouts must move."""

    def __init__(self, device: Device, bucket_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        """`group`: of all ranks (default: the job's own). Whatever moves beside other work has one of its own."""
        self._device, self._group = device.torch_device, group
        self._ranks_per_node = ranks_per_node() or dist.get_world_size()
        self._bucket_bytes = bucket_bytes
        self._routes: weakref.WeakKeyDictionary[torch.nn.Module, Route] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def reshard(
        self, source: Iterable[torch.nn.Module], destination: torch.nn.Module, has: WeightHolders, wants: WeightHolders
    ) -> None:
        """Copy a model's weights into `destination`'s parameters, whatever the layouts. Raises as `route`.

        `destination` must have its memory whenever it is called.
        """
        self.move(self.route(source, destination, has, wants))

    def route(
        self,
        source: Iterable[torch.nn.Module],
        destination: torch.nn.Module,
        has: WeightHolders,
        wants: WeightHolders,
        lasting: bool = False,
    ) -> Route:
        """The transfers of a move, made for the first one into `destination`, which must have its memory then.

        `source`: this rank's chunks of the model, one where it is not interleaved. `has`, `wants`: the ranks that hold
        each part in both layouts. `lasting`: the move goes to the memory that the parameters have now, whatever they
        have later. Raises ValueError for modules of other layouts.
        """
        if destination not in self._routes:
            targets = located_shards([destination])
            if lasting:
                targets = {name: one._replace(weight=one.weight.data) for name, one in targets.items()}
            self._routes[destination] = self._plan(located_shards(source), targets, has, wants)
        return self._routes[destination]

    @torch.no_grad()
    def move(self, route: Route) -> None:
        """This rank's part of a move."""
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
        sent, received = list[dist.P2POp](), list[dist.P2POp]()
        staged: list[tuple[Tensor, Tensor]] = []
        for transfer in bucket:
            here = (targets if transfer.forwarded else sources)[transfer.tensor] if transfer.source == rank else None
            view = targets[transfer.tensor].view(transfer) if transfer.target == rank else None
            if here and view is not None:
                view.copy_(here.view(transfer))
            elif here:
                part = here.view(transfer).to(self._device).contiguous()
                sent.append(dist.P2POp(dist.isend, part, transfer.target, self._group))
            elif view is not None:
                if view.device.type != self._device.type or not view.is_contiguous():  # else it is received right there
                    buffer = torch.empty(view.shape, dtype=view.dtype, device=self._device)
                    staged.append((view, buffer))
                    view = buffer
                received.append(dist.P2POp(dist.irecv, view, transfer.source, self._group))
        for work in dist.batch_isend_irecv([*sent, *received]) if sent or received else ():
            work.wait()
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
