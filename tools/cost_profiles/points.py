"""The points at which a run's work is measured: counts in powers of two up to the largest that it can meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import layout_rows
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.planning.memory.instance_cache import InstanceCache
from rlhfuse.planning.search.space import LONGEST_TIMES
from rlhfuse.tasks.role import Role

SMALLEST_CONTEXT = 64
SMALLEST_TOKENS = 64
MOST_SEQUENCES = 64  # of one prefill or pack: beyond it seconds go on along a straight line
BYTES = tuple(1 << power for power in range(12, 27, 2))  # of transfers: 4 KiB to 64 MiB


@dataclass(frozen=True)
class Points:
    """The grids of one run; `longest`: most tokens of one sample, `capacity`: tokens of an instance's cache."""

    longest: int
    capacity: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]  # of one prefill, and of one pack that is scored
    sequences: tuple[int, ...]
    training_tokens: tuple[int, ...]  # of one micro-batch

    def decode(self) -> list[tuple[int, int]]:
        """(batch, context of one sequence), as far as the cache holds them; the cheap ones first."""
        cells = [(b, c) for b, c in product(self.batches, self.contexts) if b * c <= self.capacity]
        return sorted(cells, key=lambda cell: cell[0] * cell[1])

    def packs(self) -> list[tuple[int, int]]:
        """(tokens, sequences) of prefills and packs, below `longest` so that a token can be drawn; cheap ones first."""
        return sorted((t, s) for t, s in product(self.tokens, self.sequences) if t <= s * (self.longest - 1))


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """first, twice that, ..., and `last` itself."""
    powers = [min(first, last)]
    while powers[-1] * 2 < last:
        powers.append(powers[-1] * 2)
    return tuple(powers if powers[-1] == last else [*powers, last])


def points_of(config: RunConfig) -> Points:
    """What this run can meet on one instance."""
    rollout, instances = config.rollout, ParallelLayout.parse(config.parallel.generation).dp
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    batch = min(rollout.max_sequences_per_instance, config.samples_per_iteration)
    most = max(rollout.max_batched_tokens, SMALLEST_TOKENS)
    return Points(
        longest=longest,
        capacity=InstanceCache.of(config, instances).blocks * rollout.block_tokens,
        batches=powers_of_two(1, batch),
        contexts=powers_of_two(SMALLEST_CONTEXT, longest),
        tokens=powers_of_two(SMALLEST_TOKENS, most),
        sequences=tuple(s for s in (1, 8, MOST_SEQUENCES) if s <= most),
        training_tokens=powers_of_two(SMALLEST_TOKENS, max(2 * SMALLEST_TOKENS, _microbatch_tokens(config, longest))),
    )


def _microbatch_tokens(config: RunConfig, longest: int) -> int:
    """Most tokens of a micro-batch; where that is open, of all that it is chosen from but a whole mini-batch."""
    fusion, pipelines = config.fusion, ParallelLayout.parse(config.parallel.actor_train).dp
    if fusion.microbatch_tokens != AUTO:
        return int(fusion.microbatch_tokens)
    samples = config.samples_per_iteration // config.algorithm.minibatches // pipelines
    if fusion.actor_microbatches != AUTO:
        return max(1, samples // fusion.actor_microbatches) * longest
    return math.ceil(min(max(1, samples), max(LONGEST_TIMES)) * longest)


def tensor_degrees(config: RunConfig) -> dict[str, int]:
    """Tensor-parallel degree of every task: generation, ROLE_inference, ROLE_train."""
    return {task: ParallelLayout.parse(getattr(config.parallel, task)).tp for task in layout_rows(config)}


def check_world(config: RunConfig, world: int) -> None:
    """Raise InputError unless `world` ranks hold whole replicas of every task."""
    for task, tp in tensor_degrees(config).items():
        if world % tp:
            fault = f"{world} ranks % tp({tp}) of parallel.{task} = {world % tp}, must be 0"
            raise InputError(f"{fault}; start a multiple of {tp} ranks with torchrun")


def with_tensor(config: RunConfig, specs: Mapping[Role, ModelSpec], tp: int, world: int) -> RunConfig:
    """The same run with tensor degree `tp` in every task, on `world` ranks. Raises InputError where it cannot be."""
    if world % tp:
        raise InputError(f"{world} ranks % tp({tp}) = {world % tp}, must be 0; start a multiple of {tp} with torchrun")
    layout = ParallelLayout(world // tp, tp, 1)
    for role in config.roles():
        specs[role].check_layout(layout, role)
    return config.with_(parallel=dict.fromkeys(layout_rows(config), str(layout)))
