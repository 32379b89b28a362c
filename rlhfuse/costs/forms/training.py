"""What training costs in seconds: of a micro-batch on the stages of one pipeline, computed or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from rlhfuse.base.parallel_layout import ParallelLayout

TICK_SECONDS = 1e-6  # schedules are searched in whole microseconds, so that ties are exact


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

    def ticks(self, cut: Sequence[int], split: bool = False) -> tuple[tuple[int, ...], ...]:
        """Forward and backward of each stage in whole ticks, at least one; with `split` F, B and W. Ends have no W."""
        stages: Sequence[tuple[float, ...]] = self.of(cut)
        if split:
            assert self.split is not None, "split backwards have a price"
            whole = replace(self, layer=(self.layer[0], self.split[0])).of(cut)
            stages = [(*stage, layers * self.split[1]) for stage, layers in zip(whole, cut)]
        rounded = [[max(1, round(seconds / TICK_SECONDS)) for seconds in stage] for stage in stages]
        return tuple(zip(*rounded))

    def of_ranks(self, cut: Sequence[int], places: int) -> tuple[float, ...]:
        """Forward and backward together of all that each rank of a pipeline has: stages place, place + places, ..."""
        stages = [sum(stage) for stage in self.of(cut)]
        return tuple(sum(stages[place::places]) for place in range(places))


class TrainingTimes(Protocol):
    """Measured times of training one model."""

    def stage_seconds(self, role: str, layout: ParallelLayout, micro: MicrobatchTokens) -> StageSeconds:
        """Seconds of one micro-batch of `role`. Raises InputError for a layout that was not measured."""
        ...
