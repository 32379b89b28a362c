"""A shipment between two engines on different ranks, also where their tensor-parallel degrees differ.

Each rank of an instance holds a run of the model's KV heads, so a rank sends to every rank whose run meets its own:

    source tp 2    rank 0: heads 0 1     rank 1: heads 2 3
    plan           0>4 heads 0:1   0>5 heads 1:2   1>6 heads 2:3   1>7 heads 3:4
    target tp 4    rank 4: 0   rank 5: 1   rank 6: 2   rank 7: 3

Between each pair:  manifest -> ; <- the blocks that are wanted ; those blocks, in buckets -> ; <- "entered".
Only blocks that the destination has room for and does not know already are sent. The samples leave the source when
all its peers have confirmed; the destination takes them when every block is there. Two buckets are under way at a
time, half of `bucket_bytes` each: the next is read while the last is sent.
Knows nothing of which samples move where, or why.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhfuse.errors import InputError
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.arrival import Arrival
from rlhfuse.gen.migration.migration import BUCKET_BYTES, BlockShape, Manifest, Shipment, buckets
from rlhfuse.parallel.collectives import receive_bytes, send_bytes

REFUSED, ENTERED = b"refused", b"entered"


@dataclass(frozen=True)
class HeadMove:
    """KV heads `first`:`last` of the model go from one global rank to another."""

    source: int
    destination: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.source}>{self.destination} heads {self.first}:{self.last}"


@dataclass(frozen=True)
class HeadPlan:
    """Who sends which KV heads to whom, between the ranks of two instances in tensor order."""

    kv_heads: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    moves: tuple[HeadMove, ...]  # ordered by source, then destination

    @staticmethod
    def between(sources: Sequence[int], destinations: Sequence[int], kv_heads: int) -> HeadPlan:
        """The plan for these ranks. Raises InputError if a degree does not divide `kv_heads`, or a rank is in both."""
        for ranks in (sources, destinations):
            if not ranks or kv_heads % len(ranks):
                raise InputError(f"kv_heads({kv_heads}) is not a multiple of tp({len(ranks)}) of ranks {list(ranks)}")
        both = set(sources) & set(destinations)
        if both:
            raise InputError(f"ranks {sorted(both)} are source and destination; move within a process instead")
        per_source, per_destination = kv_heads // len(sources), kv_heads // len(destinations)
        moves = [
            HeadMove(source, destination, first, last)
            for s, source in enumerate(sources)
            for d, destination in enumerate(destinations)
            for first in [max(s * per_source, d * per_destination)]
            for last in [min((s + 1) * per_source, (d + 1) * per_destination)]
            if first < last
        ]
        return HeadPlan(kv_heads, tuple(sources), tuple(destinations), tuple(moves))

    def __str__(self) -> str:
        return "\n".join(map(str, self.moves))

    def sent_by(self, rank: int) -> list[tuple[HeadMove, slice]]:
        """Moves from a rank, each with its heads as a slice of those that the rank holds."""
        start = self.sources.index(rank) * (self.kv_heads // len(self.sources))
        return [(m, slice(m.first - start, m.last - start)) for m in self.moves if m.source == rank]

    def received_by(self, rank: int) -> list[tuple[HeadMove, slice]]:
        """Moves to a rank, each with its heads as a slice of those that the rank holds."""
        start = self.destinations.index(rank) * (self.kv_heads // len(self.destinations))
        return [(m, slice(m.first - start, m.last - start)) for m in self.moves if m.destination == rank]


def send_shipment(
    shipment: Shipment,
    plan: HeadPlan,
    rank: int,
    group: dist.ProcessGroup | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """This rank's part of sending; every source rank calls it inside its `export_sequences`. Returns bytes of KV sent.

    Raises RuntimeError if a destination refuses the samples or its ranks disagree.
    """
    peers = plan.sent_by(rank)
    header = shipment.manifest.encode()
    for move, _ in peers:
        send_bytes(header, move.destination, group)
    answers = [receive_bytes(move.destination, group) for move, _ in peers]
    if REFUSED in answers or len(set(answers)) > 1:
        raise RuntimeError(f"rank {rank}: the samples were not taken by all of ranks {list(plan.destinations)}")
    under_way, sent = deque(), 0
    for numbers, move, heads in _messages(json.loads(answers[0]), peers, shipment.manifest.shape, bucket_bytes):
        if len(under_way) == 2:
            under_way.popleft()[0].wait()
        kv = shipment.read(numbers, heads)
        under_way.append((dist.isend(kv, move.destination, group=group), kv))  # kv lives until the send is done
        sent += kv.numel() * kv.element_size()
        del kv
    for work, _ in under_way:
        work.wait()
    for move, _ in peers:
        if receive_bytes(move.destination, group) != ENTERED:
            raise RuntimeError(f"rank {move.destination} did not confirm that the samples entered")
    return sent


def receive_shipment(
    engine: Engine,
    plan: HeadPlan,
    rank: int,
    group: dist.ProcessGroup | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[int]:
    """This rank's part of receiving; every destination rank calls it. Returns ids whose tokens will be run again.

    Raises what `Engine.receive_sequences` raises, after the source was told that the samples stay there.
    """
    peers = plan.received_by(rank)
    headers = [receive_bytes(move.source, group) for move, _ in peers]
    if len(set(headers)) > 1:
        raise RuntimeError(f"ranks {list(plan.sources)} sent different manifests; they did not take the same steps")
    manifest = Manifest.decode(headers[0])
    try:
        with engine.receive_sequences(manifest) as arrival:
            wanted = arrival.wanted
            for move, _ in peers:
                send_bytes(json.dumps(wanted).encode(), move.source, group)
            messages = _messages(wanted, peers, manifest.shape, bucket_bytes)
            _receive_blocks(engine, arrival, messages, manifest.shape, group)
    except InputError:  # raised before anything was answered
        for move, _ in peers:
            send_bytes(REFUSED, move.source, group)
        raise
    for move, _ in peers:
        send_bytes(ENTERED, move.source, group)
    return arrival.recomputed


Message = tuple[Sequence[int], HeadMove, slice]  # block numbers, between whom, heads on this rank


def _messages(
    wanted: list[int], peers: list[tuple[HeadMove, slice]], shape: BlockShape, bucket_bytes: int
) -> Iterator[Message]:
    """All messages of a rank; those between two ranks come in the same order on both.

    The share of a bucket is a matter of the heads of the move alone, which both ends know.
    """
    runs = [buckets(wanted, shape.bytes_per_head * (m.last - m.first), bucket_bytes // 2) for m, _ in peers]
    for at in range(max(map(len, runs))):
        for run, (move, heads) in zip(runs, peers):
            if at < len(run):
                yield run[at], move, heads


def _receive_blocks(
    engine: Engine, arrival: Arrival, messages: Iterator[Message], shape: BlockShape, group: dist.ProcessGroup | None
) -> None:
    under_way = deque()
    for numbers, move, heads in messages:
        if len(under_way) == 2:
            _finish(arrival, *under_way.popleft())
        size = shape.tensor_shape(len(numbers), move.last - move.first)
        kv = torch.empty(size, dtype=engine.dtype, device=engine.device)
        under_way.append((dist.irecv(kv, move.source, group=group), numbers, kv, heads))
        del kv
    while under_way:
        _finish(arrival, *under_way.popleft())


def _finish(arrival: Arrival, work: dist.Work, numbers: Sequence[int], kv: torch.Tensor, heads: slice) -> None:
    work.wait()
    arrival.write(numbers, kv, heads)
