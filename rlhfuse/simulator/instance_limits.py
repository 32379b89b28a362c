"""What one generation instance can hold, and what follows for migrations and for lengths of samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfuse.base.errors import InputError
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.job_cost import largest_flat_batch
from rlhfuse.decisions.migration import FusionLimits, SampleMoveCost, destination_count
from rlhfuse.simulator.lengths import SampleLengths


@dataclass(frozen=True)
class InstanceLimits:
    """What one generation instance can hold, and what a sample can grow to.

    `score_tokens`: tokens of one packed scoring batch. `padded_score_tokens`: 0 for packed scoring, else the
    tokens that every sample costs there whatever its length (to study engines that pad). `scoring_models`: how many
    models score, one after the other; the first `early_models` of them are loaded beneath the end of decoding.
    `reward_workers`: processes that call the reward function, 0 without one. `active_share`: part of their time in
    which samples decode, 1 where none pauses.
    """

    max_sequences: int
    kv_capacity_bytes: float  # C
    kv_bytes_per_token: float
    block_tokens: int
    bs_max: int
    max_prompt_tokens: int
    max_output_tokens: int
    score_tokens: int
    padded_score_tokens: int = 0
    scoring_models: int = 3
    reward_workers: int = 0
    early_models: int = 0
    active_share: float = 1.0

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

    def destinations(self, threshold: int, instances: int) -> int:
        """m of so many instances, two at least, keep decoding when `threshold` samples remain."""
        sizes = self.bs_max, self.sample_kv_bytes, self.kv_capacity_bytes
        return destination_count(threshold, *sizes, instances, self.active_share)

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self.kv_capacity_bytes / self.kv_bytes_per_token + 1e-6)

    @property
    def sample_kv_bytes(self) -> float:
        """M: the longest prompt plus the maximum output."""
        return self.longest * self.kv_bytes_per_token


def move_cost(costs: CostModel, limits: InstanceLimits) -> SampleMoveCost:
    """The two straight lines that decide how a sample moves: through the costs of one block and one longest sample."""
    near, far = limits.block_tokens, max(limits.longest, limits.block_tokens + 1)
    prefill = [costs.prefill_seconds(tokens, 1) for tokens in (near, far)]
    slope = (prefill[1] - prefill[0]) / (far - near)
    volumes = [tokens * limits.kv_bytes_per_token for tokens in (near, far)]
    transfer = [costs.migration_seconds(volume) for volume in volumes]
    per_byte = (transfer[1] - transfer[0]) / (volumes[1] - volumes[0])
    return SampleMoveCost(
        kv_bytes_per_token=limits.kv_bytes_per_token,
        transfer_latency_seconds=transfer[0] - per_byte * volumes[0],
        transfer_seconds_per_byte=per_byte,
        prefill_seconds_per_token=slope,
        prefill_latency_seconds=prefill[0] - slope * near,
    )


def fusion_limits(costs: CostModel, limits: InstanceLimits) -> FusionLimits:
    """What a migration plan depends on, from a cost model and what an instance holds."""
    return FusionLimits(
        bs_max=limits.bs_max,
        sample_kv_bytes=limits.sample_kv_bytes,
        capacity_kv_bytes=limits.kv_capacity_bytes,
        block_tokens=limits.block_tokens,
        move_cost=move_cost(costs, limits),
        score_tokens=limits.score_tokens,
        active_share=limits.active_share,
    )


def priced_limits(given: int, limits: InstanceLimits, costs: CostModel, lengths: SampleLengths) -> InstanceLimits:
    """`limits` with the BS_max that these costs allow at the median context, unless one is `given` (fusion.bs_max), and
    with the part of their time in which so many samples decode."""
    context = lengths.median_context
    bs_max = given or largest_flat_batch(costs, context, limits.max_sequences)
    active = lengths.active_share(costs.decode_step_seconds(bs_max, bs_max * context))
    return replace(limits, bs_max=bs_max, active_share=active)


def check_lengths(lengths: SampleLengths, instances: int, limits: InstanceLimits) -> None:
    """Raise InputError without an instance, and for samples that are longer than the limits say."""
    if instances < 1:
        raise InputError(f"{instances} generation instances; at least 1 is needed")
    if max(lengths.prompt) > limits.max_prompt_tokens or max(lengths.output) > limits.max_output_tokens:
        raise InputError(
            f"lengths up to {max(lengths.prompt)} + {max(lengths.output)} tokens exceed the run's "
            f"{limits.max_prompt_tokens} + {limits.max_output_tokens}; clip them first"
        )
