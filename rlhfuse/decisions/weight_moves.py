"""Weights from one layout to another: who sends which part of which weight to whom, and what that costs.

Weights move between the layouts of the tasks each iteration (paper section 6). The plan is the same wherever it is
made; it runs in *buckets*, whose order is part of it (parallel/reshard.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from rlhfuse.config.role import Role
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.decisions.layouts import Task
from rlhfuse.decisions.shards import Shard, model_shards
from rlhfuse.schedule.ir.ranks import FusedRanks, plain_cells

DESTINATIONS = {Role.ACTOR: "generation", Role.CRITIC: "critic_inference"}  # the critic's copy goes on to host memory


class Transfer(NamedTuple):
    """Indices [start, stop) of the cut dimension of a whole weight, from one rank to another or to itself.

    `forwarded`: the source has it not from its own layout, but received it in an earlier bucket.
    """

    tensor: str
    start: int
    stop: int
    source: int
    target: int
    bytes: int
    forwarded: bool = False

    def __str__(self) -> str:
        forwarded = " forwarded" if self.forwarded else ""
        return f"{self.tensor}[{self.start}:{self.stop}] {self.source}->{self.target} {self.bytes} B{forwarded}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of one plan. `minimum_across`: what no plan can avoid sending between nodes."""

    stays: int
    within: int
    across: int
    minimum_across: int
    fullest_sender: int  # most bytes that one rank sends
    fullest_receiver: int

    @staticmethod
    def of(transfers: Iterable[Transfer], minimum: int, devices_per_node: int) -> Traffic:
        sums, sent, received = defaultdict(int), defaultdict(int), defaultdict(int)
        for transfer in transfers:
            kind = _kind(transfer, devices_per_node)
            sums[kind] += transfer.bytes
            if kind != "stays":
                sent[transfer.source] += transfer.bytes
                received[transfer.target] += transfer.bytes
        most = [max(counts.values(), default=0) for counts in (sent, received)]
        return Traffic(sums["stays"], sums["within"], sums["across"], minimum, *most)


def _kind(transfer: Transfer, devices_per_node: int) -> str:
    if transfer.source == transfer.target:
        return "stays"
    return "within" if transfer.source // devices_per_node == transfer.target // devices_per_node else "across"


def plan_moves(sources: Sequence[Shard], targets: Sequence[Shard], devices_per_node: int) -> tuple[Transfer, ...]:
    """The transfers that fill `targets` from `sources`, every byte of every target once.

        a rank has the part itself         copied within the rank
        a rank of its node has it          from the least loaded of these
        nobody on its node has it          once from the least loaded replica on another node to one rank of the node,
                                           which forwards it to the others there

    So across nodes travel exactly the bytes that must: those that some rank of a node needs and none of it has, once.
    Deterministic, and the same for shards in any order: the largest weights first, which balances best.
    Raises ValueError naming the weight of which no source has a part that is needed.
    """
    has, wants = _by_tensor(sources), _by_tensor(targets)
    chooser = _Chooser(devices_per_node)
    for tensor in sorted(wants, key=lambda name: (-max(shard.bytes for shard in wants[name]), name)):
        held, shards = has.get(tensor, []), wants[tensor]
        for start, stop in _pieces([*held, *shards]):
            needers = [shard.rank for shard in shards if _covers(shard, start)]
            if not needers:
                continue
            holders = sorted(shard.rank for shard in held if _covers(shard, start))
            if not holders:
                raise ValueError(f"no rank has {tensor}[{start}:{stop}], which ranks {needers} need")
            chooser.serve(tensor, start, stop, shards[0].row_bytes, holders, sorted(needers))
    return tuple(chooser.chosen)


class _Chooser:
    """Chooses sources; remembers what it has given each rank to send and receive, so that loads balance."""

    def __init__(self, devices_per_node: int) -> None:
        self.chosen: list[Transfer] = []
        self._node = devices_per_node
        self._sent = {kind: defaultdict(int) for kind in ("within", "across")}
        self._received: dict[int, int] = defaultdict(int)  # from other nodes

    def serve(self, tensor: str, start: int, stop: int, row_bytes: int, holders: list[int], needers: list[int]) -> None:
        size = (stop - start) * row_bytes
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank in needers:
            by_node[rank // self._node].append(rank)
        for node, here in by_node.items():
            near = [rank for rank in holders if rank // self._node == node]
            forwarded = not near
            if forwarded:
                far = self._least(self._sent["across"], holders, node)
                first = self._least(self._received, here, start)
                self.chosen.append(Transfer(tensor, start, stop, far, first, size))
                self._sent["across"][far] += size
                self._received[first] += size
                near = [first]
                here = [rank for rank in here if rank != first]
            for rank in here:
                source = rank if rank in near else self._least(self._sent["within"], near, rank)
                self.chosen.append(Transfer(tensor, start, stop, source, rank, size, forwarded))
                self._sent["within"][source] += size if source != rank else 0

    @staticmethod
    def _least(load: dict[int, int], ranks: list[int], turn: int) -> int:
        """The least loaded rank; ties go round with `turn`."""
        return min(ranks, key=lambda rank: (load[rank], (rank - turn) % (ranks[-1] + 1)))


def minimum_across(sources: Sequence[Shard], targets: Sequence[Shard], devices_per_node: int) -> int:
    """Bytes that some rank of a node needs and no rank of that node has, each counted once per node."""
    has, total = _by_tensor(sources), 0
    for tensor, shards in _by_tensor(targets).items():
        held = has.get(tensor, [])
        for start, stop in _pieces([*held, *shards]):
            needing = {shard.rank // devices_per_node for shard in shards if _covers(shard, start)}
            having = {shard.rank // devices_per_node for shard in held if _covers(shard, start)}
            total += len(needing - having) * (stop - start) * shards[0].row_bytes
    return total


def in_buckets(transfers: Sequence[Transfer], bucket_bytes: int) -> tuple[tuple[Transfer, ...], ...]:
    """Cut a plan into buckets in which no rank sends and receives more than `bucket_bytes`, or than two rows.

    Copies within a rank need no other memory and are in the first bucket. A part is at most half a bucket, and goes
    into the first that is at most half full at both its ends. Targets begin at different places of what they receive,
    so that not all ask the same sources at once; what is forwarded comes in a later bucket than its arrival.
    """
    buckets: list[list[Transfer]] = [[transfer for transfer in transfers if transfer.source == transfer.target]]
    load: dict[tuple[int, int], int] = defaultdict(int)  # (rank, bucket) -> bytes
    closed: dict[int, int] = defaultdict(int)  # rank -> bit b is set where bucket b is more than half full
    arrived: dict[tuple[int, str, int], int] = {}  # (rank, tensor, start) -> bucket
    half = bucket_bytes // 2
    moving = [part for transfer in transfers if transfer.source != transfer.target for part in _split(transfer, half)]
    direct = _taking_turns([transfer for transfer in moving if not transfer.forwarded])
    later = _taking_turns([transfer for transfer in moving if transfer.forwarded])
    for transfer in [*direct, *later]:
        taken = closed[transfer.source] | closed[transfer.target]
        if transfer.forwarded:
            taken |= (1 << (arrived[transfer.source, transfer.tensor, transfer.start] + 1)) - 1
        bucket = (~taken & (taken + 1)).bit_length() - 1  # the lowest bit that is not set
        for end in (transfer.source, transfer.target):
            load[end, bucket] += transfer.bytes
            if load[end, bucket] > half:
                closed[end] |= 1 << bucket
        arrived[transfer.target, transfer.tensor, transfer.start] = bucket
        while len(buckets) <= bucket:
            buckets.append([])
        buckets[bucket].append(transfer)
    return tuple(tuple(bucket) for bucket in buckets)


def _split(transfer: Transfer, limit: int) -> Iterator[Transfer]:
    """The transfer in parts of at most `limit` bytes, but of one index at least."""
    row = transfer.bytes // (transfer.stop - transfer.start)
    rows = max(1, limit // row)
    for start in range(transfer.start, transfer.stop, rows):
        stop = min(start + rows, transfer.stop)
        yield transfer._replace(start=start, stop=stop, bytes=(stop - start) * row)


def _taking_turns(transfers: Sequence[Transfer]) -> list[Transfer]:
    """One of each target after the other; the n-th of N targets begins n/N through its own list."""
    by_target: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_target[transfer.target].append(transfer)
    turned = []
    for place, target in enumerate(sorted(by_target)):
        mine = by_target[target]
        first = place * len(mine) // len(by_target)
        turned.append(mine[first:] + mine[:first])
    return [transfer for row in zip_longest(*turned) for transfer in row if transfer is not None]


def move_seconds(transfers: Iterable[Transfer], hardware: HardwareSpec, devices_per_node: int) -> float:
    """Seconds until the busiest rank is done: its copies, its node's links and the network, one after the other."""
    busy = {kind: (defaultdict(int), defaultdict(int)) for kind in ("stays", "within", "across")}
    for transfer in transfers:
        sent, received = busy[_kind(transfer, devices_per_node)]
        sent[transfer.source] += transfer.bytes
        received[transfer.target] += transfer.bytes
    rates = move_rates(hardware)
    ranks = {rank for pair in busy.values() for counts in pair for rank in counts}
    return max(
        (sum(max(side[rank] for side in busy[kind]) / rate for kind, rate in rates.items()) for rank in ranks),
        default=0.0,
    )


def move_rates(hardware: HardwareSpec) -> dict[str, float]:
    """Bytes per second of a rank, by kind of transfer."""
    return {
        "stays": hardware.memory_bandwidth / 2,  # read and written
        "within": hardware.node_link_bandwidth,
        "across": hardware.cross_link_bandwidth,
    }


def _by_tensor(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    by_tensor: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_tensor[shard.tensor].append(shard)
    return by_tensor


def _pieces(shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """The finest parts between all borders of these shards."""
    borders = sorted({border for shard in shards for segment in shard.segments for border in segment})
    return zip(borders, borders[1:])


def _covers(shard: Shard, start: int) -> bool:
    return any(first <= start < stop for first, stop in shard.segments)


def shards_of_move(
    tasks: tuple[Task, ...], ranks: FusedRanks, specs: Mapping[Role, ModelSpec], element_bytes: int, model: Role
) -> tuple[list[Shard], list[Shard]]:
    """What all ranks hold of a model that trains, and what its inference or generation wants, rank by rank."""
    layouts = {task.name: task.layout for task in tasks}
    training, target = layouts[f"{model}_train"], layouts[DESTINATIONS[model]]
    has = model_shards(specs[model], training, ranks.pipelines(model), element_bytes, model.scalar_head)
    return has, model_shards(specs[model], target, plain_cells(target), element_bytes, model.scalar_head)
