"""R_t, the number of unfinished samples at which the tail is gathered: chosen by simulation, saved as threshold.json.

Paper sections 4.2 (R_t from the length distribution) and 7.3 (Figure 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import from_json, read_json
from rlhfuse.costs.table import CostTable
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.tasks.instance_limits import InstanceLimits

Ratio = Annotated[float, Field(ge=0, le=1)]
SWEEP_PERCENT = tuple(range(0, 100, 5))
FLAT = 0.01  # R_t predicted within this part of the best are as good as it


@dataclass(frozen=True)
class SweepPoint:
    """One simulated R_t. Seconds are means over the simulated batches."""

    ratio: Ratio
    threshold: NonNegativeInt
    destinations: NonNegativeInt
    fused_seconds: NonNegativeFloat
    generation_seconds: NonNegativeFloat
    migration_seconds: NonNegativeFloat
    # until instances may score, 0 where it is not known; no file has it
    agreed_seconds: Annotated[NonNegativeFloat, Field(exclude=True)] = field(default=0.0, compare=False)


@dataclass(frozen=True)
class LengthSummary:
    """Percentiles of the output lengths the choice was made for, and how many of them were clipped."""

    p50: NonNegativeInt
    p999: NonNegativeInt
    max: NonNegativeInt
    clipped: NonNegativeInt
    p90: NonNegativeInt | None = None
    p99: NonNegativeInt | None = None


@dataclass(frozen=True)
class Threshold:
    """The chosen R_t, the curve it was chosen from, and the lengths it was chosen for."""

    threshold: NonNegativeInt
    ratio: Ratio
    destinations: NonNegativeInt
    instances: PositiveInt
    serial_seconds: NonNegativeFloat
    fused_seconds: PositiveFloat
    sweep: tuple[SweepPoint, ...]
    lengths: LengthSummary
    samples: int | None = None  # of the batch; a file may leave it out
    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for point in (self, *self.sweep):
            if self.samples is not None and point.threshold > self.samples:
                raise InputError(f"threshold {point.threshold} is above its {self.samples} samples")
            if point.threshold and not 1 <= point.destinations < self.instances:
                raise InputError(
                    f"R_t = {point.threshold}: destinations is {point.destinations} of {self.instances} instances; "
                    f"1 to {self.instances - 1} can keep decoding"
                )

    @property
    def speedup(self) -> float:
        return self.serial_seconds / self.fused_seconds

    def explain(self) -> str:
        """One line for people."""
        batch = f"{self.samples} samples" if self.samples is not None else "the batch"
        if self.instances == 1:
            return "R_t = 0: with one generation instance none can be freed, inter-stage fusion is off"
        if self.threshold == 0:
            serial = f"({self.serial_seconds:.3g} s for {batch} on {self.instances} instances)"
            return f"R_t = 0: no threshold is predicted to beat serial generation and inference {serial}"
        return (
            f"R_t = {self.threshold} ({self.ratio:.0%} of {batch}): {self.destinations} of "
            f"{self.instances} instances keep the tail; predicted {self.fused_seconds:.3g} s instead of "
            f"{self.serial_seconds:.3g} s serial (x{self.speedup:.2f})"
        )


def sweep_threshold(
    batches: SampleLengths | Sequence[SampleLengths],
    instances: int,
    costs: CostTable,
    limits: InstanceLimits,
    clipped: int = 0,
    least: int = 0,
) -> Threshold:
    """Simulate R_t = 0, 5%, ..., 95% of the batch and choose (`middle_of_best`).

    Several batches of equal size (draws from a distribution) are averaged. Lengths are clipped to the limits and
    the clipped are counted, on top of `clipped` already cut by the caller. With one instance only R_t = 0 exists.
    `least`: no smaller R_t is chosen, though serial may be predicted faster.
    """
    batches = [batches] if isinstance(batches, SampleLengths) else list(batches)
    batches = [batch.clip(limits.max_prompt_tokens, limits.max_output_tokens) for batch in batches]
    samples = len(batches[0])
    if any(len(batch) != samples for batch in batches):
        raise InputError(f"batches of {sorted({len(b) for b in batches})} samples; a sweep needs equal sizes")
    ratios: dict[int, float] = {}  # of a small batch, several percentages are the same number: the least counts
    for percent in SWEEP_PERCENT if instances > 1 else (0,):
        ratios.setdefault((samples * percent + 50) // 100, percent / 100)
    seconds = Simulation(batches, instances, costs, limits).seconds(tuple(ratios))
    points = {
        threshold: SweepPoint(
            ratio=ratio,
            threshold=threshold,
            destinations=limits.destinations(threshold, instances) if threshold else 0,
            fused_seconds=seconds[threshold].total,
            generation_seconds=seconds[threshold].generation,
            migration_seconds=seconds[threshold].migration,
            agreed_seconds=seconds[threshold].agreed,
        )
        for threshold, ratio in ratios.items()
    }
    allowed = [point for point in points.values() if point.threshold >= least] or list(points.values())
    best = middle_of_best(allowed)
    every = SampleLengths(sum((b.prompt for b in batches), ()), sum((b.output for b in batches), ()))
    return Threshold(
        threshold=best.threshold,
        ratio=best.ratio,
        destinations=best.destinations,
        instances=instances,
        samples=samples,
        serial_seconds=points[0].fused_seconds,
        fused_seconds=best.fused_seconds,
        sweep=tuple(points.values()),
        lengths=LengthSummary(**every.percentiles(), clipped=clipped + sum(batch.clipped for batch in batches)),
    )


def middle_of_best(points: Sequence[SweepPoint]) -> SweepPoint:
    """The middle of the ascending R_t around the fastest that are all within FLAT of it; 0 stands for itself alone."""
    best = min(range(len(points)), key=lambda i: (points[i].fused_seconds, i))
    if points[best].threshold == 0:
        return points[best]

    def near(i: int) -> bool:
        return points[i].threshold > 0 and points[i].fused_seconds <= points[best].fused_seconds * (1 + FLAT)

    low = high = best
    while low > 0 and near(low - 1):
        low -= 1
    while high + 1 < len(points) and near(high + 1):
        high += 1
    return points[(low + high) // 2]


def load_threshold(path: str | Path) -> Threshold:
    """Read threshold.json. Raises InputError naming the file."""
    return from_json(Threshold, read_json(path), str(path))
