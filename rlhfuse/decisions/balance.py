"""A batch split into mini-batches, and a mini-batch into equally heavy micro-batches.

Mini-batches come from a seeded permutation of the whole batch: neither who produced a sample nor when it was finished
has a say (paper section 4.1). Micro-batches are balanced by Karmarkar-Karp's differencing (paper section 6). Every rank
computes the same split from the same numbers, so shapes are never exchanged.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numba import njit

from rlhfuse.base.errors import InputError

_PERMUTATION = 0x6D696E69  # the purpose of this random stream, beside (seed, iteration)


def split_minibatches(count: int, minibatches: int, seed: int, iteration: int, epoch: int = 0) -> list[list[int]]:
    """Positions of each mini-batch's samples, sizes even to one, new in every epoch. Raises InputError."""
    if count < minibatches:
        raise InputError(
            f"{count} samples cannot fill {minibatches} mini-batches; lower algorithm.minibatches or raise "
            "rollout.prompts_per_iteration * rollout.samples_per_prompt"
        )
    generator = np.random.default_rng([seed % 2**64, _PERMUTATION, iteration, *([epoch] if epoch else [])])
    return [part.tolist() for part in np.array_split(generator.permutation(count), minibatches)]


def split_microbatches(token_lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Cut a mini-batch into `parts` = K * M micro-batches of nearly equal tokens, none empty.

    Pipeline k of a model with M micro-batches per pipeline takes parts[k*M : (k+1)*M]. Raises InputError when
    there are fewer samples than parts.
    """
    _check_samples(len(token_lengths), parts)
    return partition(token_lengths, parts)


def microbatch_sums(token_lengths: np.ndarray, parts: int) -> np.ndarray:
    """Tokens of each list of `split_microbatches`, in its order; `token_lengths`: int64, one dimension.

    Raises InputError as it does.
    """
    _check_samples(len(token_lengths), parts)
    _check_weights(token_lengths.tolist(), parts)
    return differencing(np.ascontiguousarray(token_lengths, np.int64), parts)[1]


def _check_samples(samples: int, parts: int) -> None:
    if samples < parts:
        raise InputError(
            f"a mini-batch of {samples} samples cannot fill {parts} micro-batches (pipelines * "
            "micro-batches each); lower fusion.actor_microbatches, dp or algorithm.minibatches, or raise the batch"
        )


def partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split the positions of `weights` (all >= 0) into `parts` lists of nearly equal sums (Karmarkar-Karp).

    The two most uneven partial partitions are merged, heaviest part onto lightest, until one is left; non-empty parts
    go onto empty ones, so that no list is empty when there are at least `parts` weights. Each list ascends, and the
    lists are ordered by their first position, empty ones last.
    """
    _check_weights(weights, parts)
    lists: list[list[int]] = [[] for _ in range(parts)]
    for position, part in enumerate(differencing(np.array(weights, np.int64), parts)[0].tolist()):
        lists[part].append(position)
    return lists


def _check_weights(weights: Sequence[int | float], parts: int) -> None:
    if parts < 1 or any(not weight >= 0 for weight in weights):
        raise InputError(f"cannot cut weights {list(weights)[:8]}... into {parts} parts: parts >= 1 and weights >= 0")


@njit(cache=True)
def differencing(weights: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The list of `partition` in which each position is, and the sum of each list.

    Empty parts are not stored but follow from counts. Only a partial partition of two weights or more has a row; it
    lies in the row of one of those that it was made from.
    """
    count = len(weights)
    rows = np.empty((count // 2 + 1, parts, 2), np.int64)  # (sum, first position) of each part, heaviest first
    row_of, size_of = np.full(2 * count, -1), np.ones(2 * count, np.int64)
    joined = np.arange(count)  # an earlier position of the same part, or itself
    single = np.empty((2, 1, 2), np.int64)
    merged, spare = np.empty((parts, 2), np.int64), np.empty((parts, 2), np.int64)
    heap = [(np.int64(0), 0) for _ in range(count)]
    for position in range(count):
        heap[position] = (-weights[position] if parts > 1 else np.int64(0), position)
    heapq.heapify(heap)
    used = 0
    for order in range(count, 2 * count - 1):  # breaks ties between equally uneven ones: the older one first
        a, b = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        for side, state in enumerate((a, b)):
            if row_of[state] < 0:
                single[side, 0, 0], single[side, 0, 1] = weights[state], state
        first = rows[row_of[a]] if row_of[a] >= 0 else single[0]
        second = rows[row_of[b]] if row_of[b] >= 0 else single[1]
        size = _merge(first, size_of[a], second, size_of[b], parts, merged, joined)
        _sort_stably(merged, size, spare)
        row = max(row_of[a], row_of[b])
        if row < 0:
            row, used = used, used + 1
        for i in range(size):
            rows[row, i, 0], rows[row, i, 1] = merged[i, 0], merged[i, 1]
        row_of[order], size_of[order] = row, size
        lightest = merged[parts - 1, 0] if size == parts else 0
        heapq.heappush(heap, (lightest - merged[0, 0], order))
    part_of, sums, lists = np.zeros(count, np.int64), np.zeros(parts, np.int64), 0
    for position in range(count):
        if joined[position] == position:
            part_of[position], lists = lists, lists + 1
        else:
            part_of[position] = part_of[joined[position]]
        sums[part_of[position]] += weights[position]
    return part_of, sums


@njit(cache=True)
def _merge(
    a: np.ndarray, a_size: int, b: np.ndarray, b_size: int, parts: int, merged: np.ndarray, joined: np.ndarray
) -> int:
    """Parts of `a` with those of `b` in reverse, those that are not empty: how many."""
    size = 0
    for i in range(parts):
        j = parts - 1 - i
        if i < a_size and j < b_size:
            merged[size, 0], merged[size, 1] = a[i, 0] + b[j, 0], min(a[i, 1], b[j, 1])
            joined[max(a[i, 1], b[j, 1])] = merged[size, 1]
        elif i < a_size:
            merged[size, 0], merged[size, 1] = a[i, 0], a[i, 1]
        elif j < b_size:
            merged[size, 0], merged[size, 1] = b[j, 0], b[j, 1]
        else:
            continue
        size += 1
    return size


@njit(cache=True)
def _sort_stably(made: np.ndarray, size: int, spare: np.ndarray) -> None:
    """The first `size` rows by descending sum, by merging neighbouring runs: nearly all come in two or three."""
    runs = 2
    while runs > 1:
        runs, start = 0, 0
        while start < size:
            middle = start + 1
            while middle < size and made[middle - 1, 0] >= made[middle, 0]:
                middle += 1
            stop = min(middle + 1, size)
            while stop < size and made[stop - 1, 0] >= made[stop, 0]:
                stop += 1
            if middle < size:
                _merge_runs(made, start, middle, stop, spare)
            runs, start = runs + 1, stop


@njit(cache=True)
def _merge_runs(made: np.ndarray, start: int, middle: int, stop: int, spare: np.ndarray) -> None:
    for i in range(start, middle):
        spare[i, 0], spare[i, 1] = made[i, 0], made[i, 1]
    left, right, place = start, middle, start
    while left < middle:  # what is left of the second run lies where it belongs
        if right < stop and made[right, 0] > spare[left, 0]:
            made[place, 0], made[place, 1] = made[right, 0], made[right, 1]
            right += 1
        else:
            made[place, 0], made[place, 1] = spare[left, 0], spare[left, 1]
            left += 1
        place += 1
