"""R_t, the number of unfinished samples at which the tail is gathered: chosen by simulation.

A small R_t leaves no time to overlap, a large one overloads the few instances that go on decoding, so the fused
time is U-shaped in R_t. Every 5% of the batch is simulated, and 0 with them: fusion is used only where it is
predicted to be faster than serial, and of equal ones the smallest R_t is taken. `Threshold` is threshold.json.

Paper sections 4.2 (R_t from the length distribution) and 7.3 (Figure 9).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Sequence

import numpy as np

from rlhfuse.errors import InputError
from rlhfuse.simulator.cost import CostModel
from rlhfuse.simulator.generation import InstanceLimits
from rlhfuse.simulator.iteration import simulate_gen_infer
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.migration import destination_count

SWEEP_PERCENT = tuple(range(0, 100, 5))


@dataclass(frozen=True)
class SweepPoint:
    """One simulated R_t. Seconds are means over the simulated batches."""

    ratio: float
    threshold: int
    destinations: int
    fused_seconds: float
    generation_seconds: float
    migration_seconds: float


@dataclass(frozen=True)
class LengthSummary:
    """Percentiles of the output lengths the choice was made for, and how many of them were clipped."""

    p50: int
    p999: int
    max: int
    clipped: int
    p90: int | None = None
    p99: int | None = None


@dataclass(frozen=True)
class Threshold:
    """The chosen R_t, the curve it was chosen from, and the lengths it was chosen for."""

    threshold: int
    ratio: float
    destinations: int
    instances: int
    serial_seconds: float
    fused_seconds: float
    sweep: tuple[SweepPoint, ...]
    lengths: LengthSummary
    samples: int | None = None  # of the batch; a file may leave it out
    triggers: tuple[int, ...] = ()  # remaining samples at each migration, the first is `threshold`; () = serial

    @property
    def speedup(self) -> float:
        return self.serial_seconds / self.fused_seconds

    def explain(self) -> str:
        """One line for people."""
        batch = f"{self.samples} samples" if self.samples is not None else "the batch"
        if self.threshold == 0:
            return (
                f"R_t = 0: no threshold is predicted to beat serial generation and inference "
                f"({self.serial_seconds:.3g} s for {batch} on {self.instances} instances)"
            )
        return (
            f"R_t = {self.threshold} ({self.ratio:.0%} of {batch}): {self.destinations} of "
            f"{self.instances} instances keep the tail; predicted {self.fused_seconds:.3g} s instead of "
            f"{self.serial_seconds:.3g} s serial (x{self.speedup:.2f})"
        )

    def table(self) -> str:
        """The curve as text, one R_t a line; the chosen one is marked."""
        lines = ["ratio  R_t  m  fused_s  generation_s  migration_s"]
        for point in self.sweep:
            mark = " <" if point.threshold == self.threshold else ""
            lines.append(
                f"{point.ratio:5.2f} {point.threshold:4d} {point.destinations:2d} {point.fused_seconds:8.4g} "
                f"{point.generation_seconds:13.4g} {point.migration_seconds:12.3g}{mark}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict:
        return {**asdict(self), "sweep": [asdict(point) for point in self.sweep]}

    @staticmethod
    def from_dict(raw: dict, where: str = "threshold") -> "Threshold":
        """Inverse of `to_dict`. Raises InputError naming `where` and the field."""
        try:
            sweep = tuple(SweepPoint(**point) for point in raw["sweep"])
            triggers = tuple(raw.get("triggers", [raw["threshold"]] if raw["threshold"] else []))
            fields = {**raw, "triggers": triggers, "sweep": sweep, "lengths": LengthSummary(**raw["lengths"])}
            made = Threshold(**fields)
        except (KeyError, TypeError) as error:
            raise InputError(f"{where} is no threshold.json: {error}; write one with calibrate_threshold.py") from None
        for name in ("threshold", "destinations", "instances"):
            value = getattr(made, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{where}: {name} is {value!r}; a whole number is needed")
        if made.samples is not None and made.threshold > made.samples:
            raise InputError(f"{where}: threshold {made.threshold} is above its {made.samples} samples")
        return made


def sweep_threshold(
    batches: SampleLengths | Sequence[SampleLengths],
    instances: int,
    costs: CostModel,
    limits: InstanceLimits,
    clipped: int = 0,
    max_triggers: int = 1,
) -> Threshold:
    """Simulate R_t = 0, 5%, ..., 95% of the batch and take the fastest.

    Several batches of equal size (draws from a distribution) are averaged. Lengths are clipped to the limits and
    the clipped are counted, on top of `clipped` already cut by the caller. With one instance only R_t = 0 exists.
    """
    batches = [batches] if isinstance(batches, SampleLengths) else list(batches)
    batches = [batch.clip(limits.max_prompt_tokens, limits.max_output_tokens) for batch in batches]
    samples = len(batches[0])
    if any(len(batch) != samples for batch in batches):
        raise InputError(f"batches of {sorted({len(b) for b in batches})} samples; a sweep needs equal sizes")
    points: list[SweepPoint] = []
    for percent in SWEEP_PERCENT if instances > 1 else (0,):
        threshold = (samples * percent + 50) // 100
        if points and threshold <= points[-1].threshold:
            continue  # a small batch: several percentages are the same number of samples
        points.append(_point(batches, instances, costs, limits, percent / 100, threshold))
    best = min(points, key=lambda point: (point.fused_seconds, point.threshold))
    every = SampleLengths(sum((b.prompt for b in batches), ()), sum((b.output for b in batches), ()))
    clipped += sum(batch.clipped for batch in batches)
    return Threshold(
        threshold=best.threshold,
        ratio=best.ratio,
        destinations=best.destinations,
        instances=instances,
        samples=samples,
        triggers=(best.threshold,) if best.threshold else (),
        serial_seconds=points[0].fused_seconds,
        fused_seconds=best.fused_seconds,
        sweep=tuple(points),
        lengths=LengthSummary(**every.percentiles(), clipped=clipped),
    )


def _point(
    batches: Sequence[SampleLengths],
    instances: int,
    costs: CostModel,
    limits: InstanceLimits,
    ratio: float,
    threshold: int,
) -> SweepPoint:
    triggers = (threshold,) if threshold else ()
    lines = [simulate_gen_infer(batch, instances, costs, limits, triggers) for batch in batches]
    count = 0
    if threshold:
        count = destination_count(
            threshold, limits.bs_max, limits.sample_kv_bytes, limits.kv_capacity_bytes, instances
        )

    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    return SweepPoint(
        ratio=ratio,
        threshold=threshold,
        destinations=count,
        fused_seconds=mean([line.total_seconds for line in lines]),
        generation_seconds=mean([line.generation_seconds for line in lines]),
        migration_seconds=mean([line.migration_seconds for line in lines]),
    )


def load_threshold(path: str | Path) -> Threshold:
    """Read threshold.json. Raises InputError naming the file."""
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} is no threshold.json: an object is needed; write one with calibrate_threshold.py")
    return Threshold.from_dict(raw, str(path))


def save_threshold(threshold: Threshold, path: str | Path) -> None:
    """Write beside and rename."""
    beside = Path(f"{path}.tmp")
    beside.write_text(json.dumps(threshold.to_dict(), indent=1) + "\n")
    os.replace(beside, path)
