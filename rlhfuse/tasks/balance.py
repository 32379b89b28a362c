"""A batch split into mini-batches, and a mini-batch into equally heavy micro-batches.

Mini-batches come from a seeded permutation of the whole batch: neither who produced a sample nor when it was finished
has a say (paper section 4.1). Micro-batches are filled longest sample first, each onto the lightest (paper section 6
balances too). Every rank computes the same split from the same numbers, so shapes are never exchanged.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np

from rlhfuse.base.errors import InputError

_PERMUTATION = 0x6D696E69  # the purpose of this random stream, beside (seed, iteration)

Part = TypeVar("Part")


def split_minibatches(count: int, minibatches: int, seed: int, iteration: int, epoch: int = 0) -> list[list[int]]:
    """Positions of each mini-batch's samples, sizes even to one, new in every epoch. Raises InputError."""
    if count < minibatches:
        raise InputError(
            f"{count} samples cannot fill {minibatches} mini-batches; lower algorithm.minibatches or raise "
            "rollout.prompts_per_iteration * rollout.samples_per_prompt"
        )
    generator = np.random.default_rng([seed % 2**64, _PERMUTATION, iteration, *([epoch] if epoch else [])])
    return [part.tolist() for part in np.array_split(generator.permutation(count), minibatches)]


def split_microbatches(
    token_lengths: Sequence[int], parts: int, spared: Collection[int] = frozenset()
) -> list[list[int]]:
    """Cut a mini-batch into `parts` = K * M micro-batches of nearly equal tokens, none empty, the heaviest first.

    Orders of pipelines are made for equal micro-batches, and neighbours in this order are nearly so. `deal` says which
    pipeline takes which. Each micro-batch lists its samples in ascending order. `spared` samples are in none; where the
    others are fewer than parts, the shortest of them fill what is left, last: so each sample is alone, and which of the
    others come together, and who takes them, depends on these alone. Raises InputError when there are fewer samples
    than parts.
    """
    if len(token_lengths) < parts:
        raise InputError(
            f"a mini-batch of {len(token_lengths)} samples cannot fill {parts} micro-batches (pipelines * "
            "micro-batches each); lower fusion.actor_microbatches, dp or algorithm.minibatches, or raise the batch"
        )
    if parts < 1 or any(not length >= 0 for length in token_lengths):
        raise InputError(
            f"cannot cut weights {list(token_lengths)[:8]}... into {parts} parts: parts >= 1 and weights >= 0"
        )
    needed = [sample for sample in range(len(token_lengths)) if sample not in spared]
    if len(needed) < parts:
        filling = sorted(spared, key=lambda sample: (token_lengths[sample], sample))[: parts - len(needed)]
        return [*_heaviest_first(token_lengths, needed, len(needed)), *([sample] for sample in reversed(filling))]
    return _heaviest_first(token_lengths, needed, parts)


def _heaviest_first(token_lengths: Sequence[int], samples: Sequence[int], parts: int) -> list[list[int]]:
    """Micro-batches of these samples, as many as `parts`, filled longest first."""
    made: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]  # of two that weigh nothing the emptier is filled
    for sample in sorted(samples, key=lambda sample: -token_lengths[sample]):
        weight, count, part = heap[0]
        made[part].append(sample)
        heapq.heapreplace(heap, (weight + token_lengths[sample], count + 1, part))
    return [sorted(made[part]) for _, _, part in sorted(heap, key=lambda one: (-one[0], min(made[one[2]])))]


def deal(parts: Sequence[Part], pipelines: int, pipeline: int) -> list[Part]:
    """Those of `parts`, the heaviest first, that a pipeline of so many takes: in turn, and every second time back."""
    rounds = range(0, len(parts), pipelines)
    return [parts[at + (pipeline, pipelines - 1 - pipeline)[at // pipelines % 2]] for at in rounds]
