"""What one generation instance can hold, and what follows for migrations (paper section 4.2: BS_max, M, C and m)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from numba.extending import register_jitable

from rlhfuse.base.errors import InputError

MoveMode = Literal["kv", "tokens"]


@dataclass(frozen=True)
class SampleMoveCost:
    """Two straight lines: of sending keys and values, and of the prefill that builds them again from tokens."""

    kv_bytes_per_token: float
    transfer_latency_seconds: float
    transfer_seconds_per_byte: float
    prefill_seconds_per_token: float
    prefill_latency_seconds: float = 0.0

    def mode(self, sent_tokens: int, run_tokens: int) -> MoveMode:
        """The quicker of sending the cache of `sent_tokens` and running `run_tokens`; equal goes with the cache."""
        return "kv" if is_sent(self, sent_tokens, run_tokens) else "tokens"


@register_jitable(error_model="numpy", _nrt=False)
def is_sent(cost, sent_tokens, run_tokens):
    """Whether sending the cache of `sent_tokens` takes no longer than running `run_tokens`, at a SampleMoveCost."""
    volume = sent_tokens * cost.kv_bytes_per_token
    send = cost.transfer_latency_seconds + volume * cost.transfer_seconds_per_byte if sent_tokens else 0.0
    run = cost.prefill_latency_seconds + run_tokens * cost.prefill_seconds_per_token if run_tokens else 0.0
    return send <= run


@dataclass(frozen=True)
class InstanceLimits:
    """Sizes of one generation instance and of its samples, and what costs make of them.

    `bs_max` (BS_max): the largest batch that decodes about as fast as one sequence. `score_tokens`: tokens of one
    packed scoring batch. `scoring_models`: how many models score, one after the other; the first `early_models` of them
    are loaded beneath the end of decoding. `instances_per_worker`: instances that have to be free before one of their
    workers scores. `reward_workers`: processes that call the reward function, 0 without one.
    `active_share` (a): decoding / (decoding + pauses for tools), 1 where no sample pauses. `move_cost`: decides how a
    sample moves; None where no costs are known yet.
    """

    max_sequences: int
    kv_capacity_bytes: float  # C
    kv_bytes_per_token: float
    block_tokens: int
    bs_max: int
    max_prompt_tokens: int
    max_output_tokens: int
    score_tokens: int
    scoring_models: int = 3
    instances_per_worker: int = 1
    reward_workers: int = 0
    early_models: int = 0
    active_share: float = 1.0
    move_cost: SampleMoveCost | None = None

    def __post_init__(self) -> None:
        kv = "kv_capacity_bytes", "kv_bytes_per_token"
        for name in ("max_sequences", *kv, "block_tokens", "bs_max", "active_share"):
            if not getattr(self, name) > 0:
                raise InputError(f"instance limit {name} is {getattr(self, name)}; it must be above 0")
        if self.longest > self.kv_capacity_tokens:
            raise InputError(
                f"an instance holds KV of {self.kv_capacity_tokens} tokens, fewer than one sample of "
                f"{self.max_prompt_tokens} + {self.max_output_tokens} = {self.longest}; give it more KV blocks"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.max_prompt_tokens + self.max_output_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self.kv_capacity_bytes / self.kv_bytes_per_token + 1e-6)

    @property
    def sample_kv_bytes(self) -> float:
        """M: the longest prompt plus the maximum output."""
        return self.longest * self.kv_bytes_per_token

    def destinations(self, threshold: int, instances: int) -> int:
        """m of n instances keep decoding when `threshold` samples remain. Raises InputError below two instances.

            m = ceil(max(a R_t / BS_max, a R_t x M / C)), at least 1 and at most n - 1

        A paused sample has no row in a decode step, and no cache that others cannot take.
        """
        if instances < 2:
            raise InputError(f"{instances} generation instance: none can be freed; inter-stage fusion needs at least 2")
        by_memory = threshold * self.sample_kv_bytes / self.kv_capacity_bytes
        # A hair is taken off before rounding up, so that an exact quotient does not gain an instance by rounding.
        needed = self.active_share * max(threshold / self.bs_max, by_memory)
        return min(max(math.ceil(needed - 1e-9), 1), instances - 1)
