"""The cut of a batch into mini-batches and of a mini-batch into equally heavy micro-batches.

Mini-batches come from a seeded permutation of the whole batch: neither who produced a sample nor when it was finished
has a say (paper section 4.1). Micro-batches are balanced by Karmarkar-Karp's differencing (paper section 6). Every rank
computes the same cut from the same numbers, so shapes are never exchanged.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlhfuse.base.errors import InputError

_PERMUTATION = 0x6D696E69  # the purpose of this random stream, beside (seed, iteration)


def cut_minibatches(count: int, minibatches: int, seed: int, iteration: int, epoch: int = 0) -> list[list[int]]:
    """Positions of each mini-batch's samples, sizes even to one, new in every epoch. Raises InputError."""
    if count < minibatches:
        raise InputError(
            f"{count} samples cannot fill {minibatches} mini-batches; lower algorithm.minibatches or raise "
            "rollout.prompts_per_iteration * rollout.samples_per_prompt"
        )
    generator = np.random.default_rng([seed % 2**64, _PERMUTATION, iteration, *([epoch] if epoch else [])])
    return [part.tolist() for part in np.array_split(generator.permutation(count), minibatches)]


def cut_microbatches(token_lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Cut a mini-batch into `parts` = K * M micro-batches of nearly equal tokens, none empty.

    Pipeline k of a model with M micro-batches per pipeline takes parts[k*M : (k+1)*M]. Raises InputError when
    there are fewer samples than parts.
    """
    if len(token_lengths) < parts:
        raise InputError(
            f"a mini-batch of {len(token_lengths)} samples cannot fill {parts} micro-batches (pipelines * "
            "micro-batches each); lower fusion.actor_microbatches, dp or algorithm.minibatches, or raise the batch"
        )
    return partition(token_lengths, parts)


def partition(weights: Sequence[int | float], parts: int) -> list[list[int]]:
    """Split the positions of `weights` (all >= 0) into `parts` lists of nearly equal sums (Karmarkar-Karp).

    The two most uneven partial partitions are merged, heaviest part onto lightest, until one is left; non-empty parts
    go onto empty ones, so that no list is empty when there are at least `parts` weights. Each list ascends, and the
    lists are ordered by their first position, empty ones last.
    """
    if parts < 1 or any(not weight >= 0 for weight in weights):
        raise InputError(f"cannot cut weights {list(weights)[:8]}... into {parts} parts: parts >= 1 and weights >= 0")
    # a partial partition: (sum, positions) of each part, heaviest first; an empty part is lighter than any other
    heap = []
    for position, weight in enumerate(weights):
        state = [(weight, [position])] + [(0, [])] * (parts - 1)
        heap.append((-_unevenness(state), position, state))
    heapq.heapify(heap)
    order = len(heap)  # breaks ties between equally uneven partitions: the older one first
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        state = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second))]
        state.sort(key=lambda part: (-part[0], not part[1]))
        heapq.heappush(heap, (-_unevenness(state), order, state))
        order += 1
    lists = [sorted(positions) for _, positions in heap[0][2]] if heap else [[] for _ in range(parts)]
    return sorted(lists, key=lambda positions: positions or [len(weights)])


def _unevenness(state: list[tuple[float, list[int]]]) -> float:
    return state[0][0] - state[-1][0]
