"""Weights from one layout to another: who sends which part of which weight to whom (paper section 6).

The plan is the same wherever it is made. Its rows run in *buckets*, whose order is part of it (parallel/reshard.py),
and are what its price adds up (costs/layout_moves.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.decisions.weight_holders import Parts, WeightHolders


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
class WeightMoves:
    """A plan of moves, row by row in its order; int64 arrays.

    `parts`: [part, (weight, start, stop, bytes)], weights by their place in `names`. `rows`: [transfer, (part, source,
    target, forwarded)]. `minimum_across`: bytes that no plan can avoid sending between nodes: those that some rank of
    a node needs and no rank of that node has, once a node.
    """

    names: tuple[str, ...]
    parts: np.ndarray
    rows: np.ndarray
    minimum_across: int

    def __iter__(self) -> Iterator[Transfer]:
        parts = self.parts.tolist()
        for part, source, target, forwarded in self.rows.tolist():
            weight, start, stop, size = parts[part]
            yield Transfer(self.names[weight], start, stop, source, target, size, bool(forwarded))


def plan_moves(has: WeightHolders, wants: WeightHolders, devices_per_node: int) -> WeightMoves:
    """The transfers that fill what ranks want from what they have, every byte of every rank once.

        a rank has the part itself         copied within the rank
        a rank of its node has it          from the least loaded of these
        nobody on its node has it          once from the least loaded replica on another node to one rank of the node,
                                           which forwards it to the others there

    So across nodes travel exactly the bytes that must. Deterministic, and the same for shards in any order: the largest
    weights first, which balances best. Raises ValueError naming the weight of which no rank has a part that is needed.
    """
    names = tuple(sorted(wants.weights, key=lambda name: (-wants.weights[name].most_bytes, name)))
    known: dict[tuple[Parts, Parts], np.ndarray] = {}  # weights of one shape are cut alike
    blocks = []
    for name in names:
        sides = has.weights[name].parts if name in has.weights else (), wants.weights[name].parts
        if sides not in known:
            known[sides] = np.array(_pieces(name, *sides, wants), np.int64)
        blocks.append(known[sides])
    counts, pieces = list(map(len, blocks)), np.concatenate(blocks)
    size = (pieces[:, 1] - pieces[:, 0]) * np.repeat([wants.weights[name].row_bytes for name in names], counts)
    parts = np.column_stack([np.repeat(np.arange(len(names)), counts), pieces[:, :2], size])
    nodes = int(max(has.ranks.max(), wants.ranks.max())) // devices_per_node + 1
    held, needed = (side.bounds(devices_per_node, nodes) for side in (has, wants))
    rows = choose_rows(parts, pieces[:, 2:], has.ranks, held, wants.ranks, needed)
    return WeightMoves(names, parts, rows, _minimum_across(size, pieces[:, 2:], np.diff(held) > 0, np.diff(needed) > 0))


def _pieces(name: str, held: Parts, needed: Parts, wants: WeightHolders) -> list[tuple[int, int, int, int]]:
    """What somebody needs of a weight, between all borders: start, stop, lists of its holders and of its needers."""
    borders = sorted({border for start, stop, _ in (*held, *needed) for border in (start, stop)})
    pieces = []
    for start, stop in zip(borders, borders[1:]):
        holders, needers = (
            next((ranks for first, end, ranks in side if first <= start < end), None) for side in (held, needed)
        )
        if needers is None:
            continue
        if holders is None:
            ranks = wants.ranks[wants.starts[needers] : wants.starts[needers + 1]].tolist()
            raise ValueError(f"no rank has {name}[{start}:{stop}], which ranks {ranks} need")
        pieces.append((start, stop, holders, needers))
    return pieces


def _minimum_across(size: np.ndarray, lists: np.ndarray, holding: np.ndarray, needing: np.ndarray) -> int:
    """`holding`, `needing`: whether a list has ranks on a node, [list, node]."""
    pairs, which = np.unique(lists[:, 0] * len(needing) + lists[:, 1], return_inverse=True)
    lacking = (needing[pairs % len(needing)] & ~holding[pairs // len(needing)]).sum(axis=1)
    return int((lacking[which] * size).sum())


@njit(cache=True)
def choose_rows(
    parts: np.ndarray,
    lists: np.ndarray,
    holders: np.ndarray,
    held_on: np.ndarray,
    needers: np.ndarray,
    needed_on: np.ndarray,
) -> np.ndarray:
    """Rows of a plan: loads balance by what each rank was given before. `lists`: [part, (holders, needers)];
    `held_on`, `needed_on`: bounds of these lists by node."""
    nodes, world, count = held_on.shape[1] - 1, 1 + max(holders.max(), needers.max()), 0
    for part in range(len(parts)):
        count += needed_on[lists[part, 1], nodes] - needed_on[lists[part, 1], 0]
    rows, row = np.empty((count, 4), np.int64), 0
    loads = np.zeros((3, world), np.int64)
    sent_within, sent_across, received_across = loads[0], loads[1], loads[2]
    for part in range(len(parts)):
        start, size, source, target = parts[part, 1], parts[part, 3], lists[part, 0], lists[part, 1]
        for node in range(nodes):
            low, high = needed_on[target, node], needed_on[target, node + 1]
            if low == high:
                continue
            near, end = held_on[source, node], held_on[source, node + 1]
            first, own = -1, near  # the rank that the part comes to from another node; its next holder on this one
            if near == end:
                far = _least(sent_across, holders, held_on[source, 0], int(held_on[source, nodes]), node)
                first = _least(received_across, needers, low, high, start)
                rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = part, far, first, 0
                row += 1
                sent_across[far] += size
                received_across[first] += size
            for i in range(low, high):
                rank = giver = needers[i]
                if rank == first:
                    continue
                while own < end and holders[own] < rank:
                    own += 1
                if first >= 0:
                    giver = first
                elif own == end or holders[own] != rank:
                    giver = _least(sent_within, holders, near, end, rank)
                if giver != rank:
                    sent_within[giver] += size
                rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = part, giver, rank, first >= 0
                row += 1
    return rows


@njit(cache=True)
def _least(load: np.ndarray, ranks: np.ndarray, low: int, high: int, turn: int) -> int:
    """The least loaded of ranks[low:high]; ties go round with `turn`."""
    around = ranks[high - 1] + 1
    turn %= around
    best, least, after = -1, 0, 0
    for i in range(low, high):
        rank = ranks[i]
        if best < 0 or load[rank] <= least:
            turned = rank - turn if rank >= turn else rank - turn + around
            if best < 0 or load[rank] < least or turned < after:
                best, least, after = rank, load[rank], turned
    return best


def in_buckets(moves: Iterable[Transfer], bucket_bytes: int) -> tuple[tuple[Transfer, ...], ...]:
    """Cut a plan into buckets in which no rank sends and receives more than `bucket_bytes`, or than two rows.

    Copies within a rank need no other memory and are in the first bucket. A part is at most half a bucket, and goes
    into the first that is at most half full at both its ends. Targets begin at different places of what they receive,
    so that not all ask the same sources at once; what is forwarded comes in a later bucket than its arrival.
    """
    transfers = list(moves)
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
