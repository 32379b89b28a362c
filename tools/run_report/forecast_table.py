"""Predicted beside measured seconds of a training run: by phase, and by rank and kind of work.

A phase's error says that something is wrong; the table of spans says what: a step's pace, loading, waiting.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from run_report.forecast import PHASES, Forecast, Forecaster, Row
from run_report.run_files import RunFiles

from rlhfuse.base.clock import GROUPS, Span
from rlhfuse.base.errors import InputError

NAMES = {
    "reshard": "weights moved",
    "gen": "generation",
    "infer": "inference beyond it",
    "adv": "advantages",
    "train": "training",
    "step": "whole iteration",
}
ITERATION = "reshard"  # the kind of span that every rank has once in an iteration


@dataclass(frozen=True)
class PhaseRow:
    """One phase over several iterations: sums of seconds, and of how far each prediction was off."""

    phase: str
    measured: float
    predicted: float
    off: float  # sum of |predicted - measured|
    blind: float
    blind_off: float

    @property
    def error(self) -> float:
        """Error of the phase's time with the lengths known, relative to what was measured."""
        return self.off / self.measured if self.measured else 0.0

    @property
    def blind_error(self) -> float:
        """The same without them."""
        return self.blind_off / self.measured if self.measured else 0.0

    @staticmethod
    def of(phase: str, rows: Sequence[Row], forecasts: Sequence[Forecast]) -> PhaseRow:
        measured = [row[f"timing_s/{phase}"] for row in rows]
        known, blind = [one.seconds[phase] for one in forecasts], [one.blind[phase] for one in forecasts]
        return PhaseRow(phase, sum(measured), sum(known), _off(known, measured), sum(blind), _off(blind, measured))


def _off(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return sum(abs(p - m) for p, m in zip(predicted, measured, strict=True))


@dataclass(frozen=True)
class ForecastTable:
    """The phases, the whole iteration last, over the iterations that were predicted."""

    iterations: tuple[int, ...]
    rows: tuple[PhaseRow, ...]

    @staticmethod
    def of(run: RunFiles, skip: int = 0) -> ForecastTable:
        """Without the first `skip` iterations. Raises InputError when none is left, or a file is missing."""
        forecaster = Forecaster(run)
        forecasts = [forecaster.forecast(number) for number in forecaster.iterations if number >= skip]
        if not forecasts:
            why = "that begins with the second iteration of a run; train some more"
            raise InputError(f"no iteration can be predicted: {why}")
        numbers = tuple(forecast.iteration for forecast in forecasts)
        rows = [row for row in run.rows if row["iteration"] in numbers]
        return ForecastTable(numbers, tuple(PhaseRow.of(phase, rows, forecasts) for phase in PHASES))

    @property
    def mean_error(self) -> float:
        """Over the phases, the whole iteration among them, each counting the same."""
        return statistics.mean(row.error for row in self.rows)

    @property
    def blind_mean_error(self) -> float:
        return statistics.mean(row.blind_error for row in self.rows)

    def text(self) -> str:
        """For a terminal: mean seconds of an iteration."""
        count = len(self.iterations)
        lines = [f"{'phase':20} {'measured':>9} {'predicted':>9} {'off by':>7}   {'lengths unknown':>15} {'off by':>7}"]
        lines += [
            f"{NAMES[row.phase]:20} {row.measured / count:7.3f} s {row.predicted / count:7.3f} s {row.error:7.1%}"
            f"   {row.blind / count:13.3f} s {row.blind_error:7.1%}"
            for row in self.rows
        ]
        known, unknown = f"{self.mean_error:.1%}", f"{self.blind_mean_error:.1%}"
        mean = f"mean error {known} with the iteration's lengths known, {unknown} without, over {count} iterations"
        return "\n".join([*lines, mean])

    def to_dict(self) -> dict[str, Any]:
        """Sums of seconds over the iterations."""
        return {
            "iterations": list(self.iterations),
            "phases": [{**asdict(row), "error": row.error, "blind_error": row.blind_error} for row in self.rows],
            "mean_error": self.mean_error,
            "blind_mean_error": self.blind_mean_error,
        }


def span_table(spans: Sequence[Span]) -> str:
    """Mean seconds of an iteration by rank and kind of work, kinds in the order in which they begin, as text.

    Raises InputError where some rank has no measured iteration.
    """
    iterations = {rank: 0 for rank in sorted({span.rank for span in spans})}
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span in sorted(spans, key=lambda span: (span.rank, span.start_seconds)):
        sums[span.rank, span.kind][GROUPS.index(span.group)] += span.end_seconds - span.start_seconds
        iterations[span.rank] += span.kind == ITERATION and span.group == "measured"
    if not iterations or not all(iterations.values()):
        raise InputError(f"the trace has no measured {ITERATION!r} on some rank; give the folder of a training run")
    lines = [f"{'rank':>4} {'work':10} {'measured':>9} {'predicted':>9} {'difference':>10}"]
    for (rank, kind), seconds in sorted(sums.items(), key=lambda item: item[0][0]):
        predicted, measured = (total / iterations[rank] for total in seconds)
        lines.append(f"{rank:4d} {kind:10} {measured:7.3f} s {predicted:7.3f} s {predicted - measured:+8.3f} s")
    return "\n".join(lines)
