"""The interfaces of what work costs: `CostModel` of generation and inference, `TrainingCost` of a model that trains.

CostModels: `JobCost` (a roofline, job_cost.py), `ProfiledCost` (of tools/profile_costs.py), `MeasuredCost` (of a job).
TrainingCosts: `AnalyticCost` and `ProfiledTraining`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.fits import check_seconds
from rlhfuse.costs.forms.form import DecodeRow, Form, decode_seconds, packed_seconds, transfer_seconds
from rlhfuse.decisions.instance_limits import InstanceLimits, SampleMoveCost


@dataclass(frozen=True)
class RewardCost:
    """One call of the reward function: seconds, and how many calls a worker has under way at once."""

    seconds: float
    at_once: int = 1

    def __post_init__(self) -> None:
        check_seconds("seconds of a reward call", self.seconds)
        if not 1 <= self.at_once <= LARGEST:
            raise InputError(f"calls of a reward function at_once must be in [1, {LARGEST}], not {self.at_once}")

    @staticmethod
    def mean(rows: Sequence[Sequence[float]]) -> RewardCost | None:
        """A call of several rows (calls, how many at once, seconds of them all); None where there was none."""
        calls = sum(row[0] for row in rows)
        return RewardCost(sum(row[2] for row in rows) / calls, int(rows[-1][1])) if calls else None


class MicrobatchTokens(NamedTuple):
    """What a micro-batch holds: tokens of so many sequences, and how many of them go through the output layer."""

    tokens: float
    sequences: float
    outputs: float


@dataclass(frozen=True)
class StageSeconds:
    """Seconds (forward, backward) of one micro-batch: of a layer, and of what each stage has beside its layers."""

    layer: tuple[float, float]
    ends: tuple[tuple[float, float], ...]  # by stage
    split: tuple[float, float] | None = None  # B and W of a layer's split backward; None: not known

    def of(self, cut: Sequence[int]) -> tuple[tuple[float, float], ...]:
        """Seconds (forward, backward) of each stage, where they have so many layers."""
        forward, backward = self.layer
        return tuple((count * forward + end[0], count * backward + end[1]) for count, end in zip(cut, self.ends))

    def ticks(self, cut: Sequence[int], tick_seconds: float, split: bool = False) -> tuple[tuple[int, ...], ...]:
        """Forward and backward of each stage in whole ticks, at least one; with `split` F, B and W. Ends have no W."""
        stages: Sequence[tuple[float, ...]] = self.of(cut)
        if split:
            assert self.split is not None, "split backwards have a price"
            whole = replace(self, layer=(self.layer[0], self.split[0])).of(cut)
            stages = [(*stage, layers * self.split[1]) for stage, layers in zip(whole, cut)]
        rounded = [[max(1, round(seconds / tick_seconds)) for seconds in stage] for stage in stages]
        return tuple(zip(*rounded))

    def of_ranks(self, cut: Sequence[int], places: int) -> tuple[float, ...]:
        """Forward and backward together of all that each rank of a pipeline has: stages place, place + places, ..."""
        stages = [sum(stage) for stage in self.of(cut)]
        return tuple(sum(stages[place::places]) for place in range(places))


class TrainingCost(Protocol):
    """Seconds of the stages of ONE pipeline of a model that trains."""

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def splits(self) -> bool:
        """Whether the parts of a split backward have a price."""
        ...

    def stage_seconds(self, micro: MicrobatchTokens) -> StageSeconds:
        """Seconds of one micro-batch, of a layer and of the ends."""
        ...


class CostModel(Protocol):
    """Seconds of the work of generation and inference on ONE generation instance.

    An implementation says them as forms (forms/), which a compiled kernel evaluates as the methods here do.
    """

    @property
    def decode_form(self) -> Form:
        """One part: seconds of (sequences, tokens of context over all of them)."""
        ...

    @property
    def prefill_form(self) -> Form:
        """Seconds of (tokens, sequences)."""
        ...

    @property
    def score_form(self) -> Form:
        """Seconds of (tokens, sequences)."""
        ...

    @property
    def transfer_form(self) -> Form:
        """Seconds of bytes."""
        ...

    def decode_row(self, batch: float) -> DecodeRow:
        """What a decode step of `batch` sequences has beside its form."""
        return DecodeRow()

    # seconds beside the forms
    swap_in: float  # of loading the weights of all models that score from host memory
    capture: float  # of recording one shape of a decode step as a CUDA graph; 0: that is not done, or was not measured
    meeting: float  # of agreeing who holds what, from the last to come until all go on; 0: only a job could measure it
    release: float  # of giving back cache and weights where nothing more decodes, before others are loaded; likewise
    reward: RewardCost | None = None  # a sample's call of the function; None: there is none, or it was not measured

    convex: ClassVar[bool] = False  # whether seconds of steps and forwards are known to be, in each count
    measures_training: ClassVar[bool] = False

    def training_cost(self, role: str, analytic: TrainingCost) -> TrainingCost:
        """Costs of training `role`, which `analytic` prices where nothing was measured. Raises InputError where its
        tensor degree was not."""
        return analytic

    def step_seconds(self, role: str, analytic: float) -> float:
        """The optimizer's step of `role` after a mini-batch, `analytic` where nothing else is known."""
        return analytic

    def move_seconds(self, role: str, analytic: float) -> float:
        """The move of the weights of `role` in an iteration, likewise."""
        return analytic

    def score_bends(self) -> tuple[float, ...]:
        """Tokens of one replica's pack at which seconds of scoring bend."""
        return ()

    def beyond(self, sequences: float, context: float, pack: float, training: Mapping[str, float]) -> tuple[str, ...]:
        """What is larger than anything measured, in words: decoding so many `sequences` of up to `context` tokens,
        packs of so many tokens of an instance, and by role micro-batches of so many."""
        return ()

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        """Prefill of `sequences` prompts of `tokens` tokens in all."""
        form = self.prefill_form
        return packed_seconds(form.parts, 0, len(form.parts), form.points, tokens, sequences)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """One decode step of `batch` sequences that hold `context_tokens` of keys and values in all."""
        if batch <= 0:
            return 0.0
        form, row = self.decode_form, self.decode_row(batch)
        return decode_seconds(form.parts[0], form.points, row, batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        """Reference, reward and critic forward over a packed batch, one model after the other."""
        form = self.score_form
        return packed_seconds(form.parts, 0, len(form.parts), form.points, tokens, sequences)

    def migration_seconds(self, kv_bytes: float) -> float:
        """Sending (or receiving) `kv_bytes` of keys and values between two instances."""
        form = self.transfer_form
        return transfer_seconds(form.parts, 0, len(form.parts), form.points, kv_bytes)

    def link_bandwidth(self) -> float:
        """Bytes/s between two instances, of large transfers; without end where these take no longer."""
        size = 1 << 24
        seconds = self.migration_seconds(2 * size) - self.migration_seconds(size)
        return size / seconds if seconds > 0 else math.inf

    def move_cost(self, limits: InstanceLimits) -> SampleMoveCost:
        """The two straight lines that decide how a sample moves: through the costs of one block and of one longest
        sample."""
        near, far = limits.block_tokens, max(limits.longest, limits.block_tokens + 1)
        prefill = [self.prefill_seconds(tokens, 1) for tokens in (near, far)]
        slope = (prefill[1] - prefill[0]) / (far - near)
        volumes = [tokens * limits.kv_bytes_per_token for tokens in (near, far)]
        transfer = [self.migration_seconds(volume) for volume in volumes]
        per_byte = (transfer[1] - transfer[0]) / (volumes[1] - volumes[0])
        return SampleMoveCost(
            kv_bytes_per_token=limits.kv_bytes_per_token,
            transfer_latency_seconds=transfer[0] - per_byte * volumes[0],
            transfer_seconds_per_byte=per_byte,
            prefill_seconds_per_token=slope,
            prefill_latency_seconds=prefill[0] - slope * near,
        )
