"""Which samples are generated and scored together: shares of instances, and packs by token budget.

Shared by the runtime and its simulation, whose kernel compiles what is marked so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from numba.extending import register_jitable

SMALLEST_PACK = 4  # a pack may shrink to the budget divided by this: smaller ones pay more for calls than they save


def scoring_packs(lengths: Sequence[int], workers: int, budget: int) -> list[list[int]]:
    """Positions of `lengths` (tokens) in packs of at most `budget` tokens, to be drawn in this order by `workers`.

    Longest sample first. While much is left a pack takes the whole budget; when less than a budget for each worker is
    left, a worker's share of the rest, so that workers stop at about the same time. Two workers, budget 12:

        samples 6 6 5 4 3 3 2 2 1      packs 6 6 | 5 4 | 3 3 | 2 | 2 1

    A sample longer than the budget is a pack of its own. Ties keep the order given.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ends = pack_ends([lengths[i] for i in order], workers, budget)
    return [order[start:end] for start, end in pairwise((0, *ends))]


@register_jitable(error_model="numpy")
def pack_ends(lengths, workers, budget):
    """Where each pack of `lengths`, the longest first, ends (see `scoring_packs`)."""
    left, room, ends = 0, 0, []
    for tokens in lengths:
        left += tokens
    for position, tokens in enumerate(lengths):
        if position == 0 or tokens > room:
            ends.append(position)
            room = min(budget, max(math.ceil(left / workers), math.ceil(budget / SMALLEST_PACK)))
        room -= tokens
        left -= tokens
    ends.append(len(lengths))
    return ends[1:]


@register_jitable(error_model="numpy", _nrt=False)
def streamed_pack(lengths, tokens, workers, budget):
    """How many waiting samples, of `tokens` in all, one of `workers` takes: its share within `budget`, at least one."""
    share, taken, count = min(budget, math.ceil(tokens / workers)), 0, 0
    for own in lengths:
        taken += own
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
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for position, worker in zip(order, dealt_to([lengths[i] for i in order], workers)):
        shares[worker].append(position)
    return shares


@register_jitable(error_model="numpy")
def dealt_to(lengths, workers):
    """The worker of each of `lengths`, the longest first (see `deal`)."""
    loads, chosen = [(0, worker) for worker in range(workers)], []
    for tokens in lengths:
        load, worker = heapq.heappop(loads)
        chosen.append(worker)
        heapq.heappush(loads, (load + tokens, worker))
    return chosen
