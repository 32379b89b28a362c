"""A transfer between two engines on different ranks, whose tensor-parallel degrees may differ.

Between two ranks whose KV heads meet:  manifest -> ; <- the blocks that are missing ; those, in buckets -> ; <- "done".
Only blocks that the destination has room for and does not know already are sent, two buckets under way at a time. The
sequences leave the source when all its peers have confirmed; the destination takes them when every block is there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.import_transaction import ImportTransaction
from rlhfuse.gen.migration.kv_transfer import BUCKET_BYTES, BlockShape, KVTransfer, TransferManifest
from rlhfuse.parallel.collectives import receive_bytes, send_bytes, start_transfer

REFUSED, DONE = b"refused", b"done"


class HeadMove(NamedTuple):
    """KV heads `first`:`last` of the model go from one global rank to another."""

    source: int
    destination: int
    first: int
    last: int


@dataclass(frozen=True)
class HeadPlan:
    """Who sends which KV heads to whom: each rank of an instance holds a run and sends to all whose run meets its own.

    source tp 2    rank 0: heads 0 1     rank 1: heads 2 3
    moves          0>4 heads 0:1   0>5 heads 1:2   1>6 heads 2:3   1>7 heads 3:4
    target tp 4    rank 4: 0   rank 5: 1   rank 6: 2   rank 7: 3
    """

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

    def moves_of(self, rank: int) -> list[tuple[HeadMove, slice]]:
        """Moves from or to a rank, each with its heads as a slice of those that the rank holds."""
        side = self.sources if rank in self.sources else self.destinations
        start = side.index(rank) * (self.kv_heads // len(side))
        return [(m, slice(m.first - start, m.last - start)) for m in self.moves if rank in (m.source, m.destination)]


def send_sequences(transfer: KVTransfer, plan: HeadPlan, rank: int, *, bucket_bytes: int = BUCKET_BYTES) -> int:
    """This rank's part of sending; every source rank calls it inside its `export_sequences`. Returns bytes of KV sent.

    Raises RuntimeError if a destination refuses the samples or its ranks disagree.
    """
    peers = plan.moves_of(rank)
    manifest = transfer.manifest.to_bytes()
    for move, _ in peers:
        send_bytes(manifest, move.destination)
    answers = [receive_bytes(move.destination) for move, _ in peers]
    if REFUSED in answers or len(set(answers)) > 1:
        raise RuntimeError(f"rank {rank}: the samples were not taken by all of ranks {list(plan.destinations)}")
    under_way, sent = deque(), 0
    for numbers, move, heads in _messages(json.loads(answers[0]), peers, transfer.manifest.shape, bucket_bytes):
        if len(under_way) == 2:
            under_way.popleft()[0].wait()
        kv = transfer.read(numbers, heads)
        under_way.append((start_transfer(dist.isend, kv, move.destination), kv))  # kv lives until it is sent
        sent += kv.numel() * kv.element_size()
        del kv
    for work, _ in under_way:
        work.wait()
    for move, _ in peers:
        if receive_bytes(move.destination) != DONE:
            raise RuntimeError(f"rank {move.destination} did not confirm that it has the samples")
    return sent


def receive_sequences(engine: Engine, plan: HeadPlan, rank: int, *, bucket_bytes: int = BUCKET_BYTES) -> list[int]:
    """This rank's part of receiving; every destination rank calls it. Returns ids whose tokens will be run again.

    Raises what `Engine.import_sequences` raises, after the source was told that the samples stay there.
    """
    peers = plan.moves_of(rank)
    manifests = [TransferManifest.from_bytes(receive_bytes(move.source)) for move, _ in peers]
    manifest, *others = manifests
    if any(other != manifest for other in others):
        raise RuntimeError(f"ranks {list(plan.sources)} sent different manifests; they did not take the same steps")
    try:
        with engine.import_sequences(manifest) as transaction:
            missing = transaction.missing_blocks
            for move, _ in peers:
                send_bytes(json.dumps(missing).encode(), move.source)
            messages = _messages(missing, peers, manifest.shape, bucket_bytes)
            _receive_blocks(transaction, messages)
    except InputError:  # raised before anything was answered
        for move, _ in peers:
            send_bytes(REFUSED, move.source)
        raise
    for move, _ in peers:
        send_bytes(DONE, move.source)
    return transaction.recomputed


Message = tuple[Sequence[int], HeadMove, slice]  # block numbers, between whom, heads on this rank


def _messages(
    missing: list[int], peers: list[tuple[HeadMove, slice]], shape: BlockShape, bucket_bytes: int
) -> Iterator[Message]:
    """All messages of a rank; those between two ranks come in the same order on both."""
    # A bucket's share depends on the heads of the move alone, which both ends know; it holds a block at least.
    sizes = [max(1, bucket_bytes // 2 // (shape.bytes_per_head * (move.last - move.first))) for move, _ in peers]
    runs = [[missing[at : at + size] for at in range(0, len(missing), size)] for size in sizes]
    for index in range(max(map(len, runs))):
        for run, (move, heads) in zip(runs, peers):
            if index < len(run):
                yield run[index], move, heads


def _receive_blocks(transaction: ImportTransaction, messages: Iterator[Message]) -> None:
    under_way = deque()

    def finish_first() -> None:
        work, *block_data = under_way.popleft()
        work.wait()
        transaction.write(*block_data)

    for numbers, move, heads in messages:
        if len(under_way) == 2:
            finish_first()
        kv = transaction.empty(len(numbers), move.last - move.first)
        under_way.append((start_transfer(dist.irecv, kv, move.source), numbers, kv, heads))
        del kv
    while under_way:
        finish_first()
