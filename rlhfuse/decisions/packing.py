"""Which samples are generated and scored together: shares of instances, and packs by token budget.

Shared by the runtime and its simulation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

SMALLEST_PACK = 4  # a pack may shrink to the budget divided by this: smaller ones pay more for calls than they save


def scoring_packs(lengths: Sequence[int], workers: int, budget: int) -> list[list[int]]:
    """Positions of `lengths` (tokens) in packs of at most `budget` tokens, to be drawn in this order by `workers`.

    Longest sample first. While much is left a pack takes the whole budget; when less than a budget for each worker is
    left, a worker's share of the rest, so that workers stop at about the same time. Two workers, budget 12:

        samples 6 6 5 4 3 3 2 2 1      packs 6 6 | 5 4 | 3 3 | 2 | 2 1

    A sample longer than the budget is a pack of its own. Ties keep the order given.
    """
    left = sum(lengths)
    packs: list[list[int]] = []
    room = 0
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not packs or lengths[position] > room:
            packs.append([])
            room = min(budget, max(math.ceil(left / workers), math.ceil(budget / SMALLEST_PACK)))
        packs[-1].append(position)
        room -= lengths[position]
        left -= lengths[position]
    return packs


def streamed_pack(lengths: Sequence[int], workers: int, budget: int) -> int:
    """How many waiting samples one of `workers` takes: its share of the tokens within `budget`, at least one."""
    share = min(budget, math.ceil(sum(lengths) / workers))
    taken = count = 0
    for tokens in lengths:
        taken += tokens
        if taken > share:
            break
        count += 1
    return max(1, count)


def split_samples(samples: int, instances: int) -> tuple[range, ...]:
    """Sample indices of each instance: contiguous and even, so that copies of one prompt stay together."""
    edges = [samples * i // instances for i in range(instances + 1)]
    return tuple(range(a, b) for a, b in zip(edges, edges[1:]))


def deal(lengths: Sequence[int], workers: int) -> list[list[int]]:
    """Positions for each worker, balanced by tokens: the longest first, each to the worker with the fewest."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    heap = [(0, worker) for worker in range(workers)]
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, worker = heapq.heappop(heap)
        shares[worker].append(position)
        heapq.heappush(heap, (load + lengths[position], worker))
    return shares
