"""Where the time of a run went: one row per phase, and one for all that is none of them.

Of the iterations after warm-up, because the first ones compile kernels and measure costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfuse.tasks.role import LEARNERS

PHASES = {  # metric -> what people call it
    "timing_s/gen": "generation",
    "timing_s/infer": "inference beyond it",
    "timing_s/train": "training",
    "timing_s/reshard": "weights moved",
    "timing_s/adv": "rewards and advantages",
    "timing_s/eval": "evaluation",
    "timing_s/books": "books and logs",
}
UTILISATION = {
    "perf/mfu/gen_infer": "generation and inference",
    **{f"perf/mfu/{role}": f"{role}'s training" for role in LEARNERS},
    "perf/mfu/step": "whole iteration",
}
WARM_UP_ITERATIONS = 1


@dataclass(frozen=True)
class PhaseTime:
    """Mean and median seconds of one phase in an iteration, and the mean's share of the iteration."""

    name: str
    seconds: float
    share: float
    median: float


def number(value: Any) -> float | None:
    """A value of metrics.jsonl where it is a finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def after_warm_up(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The iterations that figures are taken from: all but the first of the run, or that one if there is no other."""
    return [row for row in rows if row["iteration"] >= WARM_UP_ITERATIONS] or rows


def whole_seconds(row: Mapping[str, Any]) -> float:
    """From the start of an iteration to the start of the next: the step, evaluation, R_t, logs and checkpoints."""
    return row["timing_s/step"] + row.get("timing_s/books", 0.0) + row.get("timing_s/eval", 0.0)


def phase_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds of every iteration by phase that the run measured, of `PHASES`; then "other", which is the rest."""
    known = {name: metric for metric, name in PHASES.items() if any(metric in row for row in rows)}
    seconds = {name: [number(row.get(metric)) or 0.0 for row in rows] for name, metric in known.items()}
    spent = [sum(values) for values in zip(*seconds.values())] or [0.0] * len(rows)
    return {**seconds, "other": [max(whole_seconds(row) - had, 0.0) for row, had in zip(rows, spent)]}


def phase_times(rows: Sequence[Mapping[str, Any]]) -> list[PhaseTime]:
    """One row per phase that the run measured, then "other" and "iteration"; nothing without an iteration."""
    kept = after_warm_up(rows)
    if not kept:
        return []
    seconds = {**phase_seconds(kept), "iteration": [*map(whole_seconds, kept)]}
    whole = statistics.mean(seconds["iteration"])
    return [
        PhaseTime(name, mean := statistics.mean(values), mean / whole if whole else 0.0, statistics.median(values))
        for name, values in seconds.items()
    ]


def samples_per_second(rows: Sequence[Mapping[str, Any]]) -> float:
    """Samples over time, of the iterations after warm-up."""
    kept = after_warm_up(rows)
    seconds = sum(map(whole_seconds, kept))
    return sum(row["perf/samples_per_second"] * row["timing_s/step"] for row in kept) / seconds if seconds else 0.0


def render_phase_times(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as text, printed at the end of a run."""
    times = phase_times(rows)
    kept = after_warm_up(rows)
    width = max(len(phase.name) for phase in times)
    lines = [f"mean of {len(kept)} iterations, {samples_per_second(rows):.4g} samples per second"]
    lines += [f"  {phase.name:{width}s} {phase.seconds:9.3f} s {phase.share:6.1%}" for phase in times]
    known = {name: metric for metric, name in UTILISATION.items() if metric in kept[-1]}  # 0 where a row lacks it
    used = [f"{name} {statistics.fmean(row.get(of) or 0.0 for row in kept):.1%}" for name, of in known.items()]
    return "\n".join([*lines, f"share of the ranks' peak FLOP/s: {', '.join(used)}"] if used else lines)
