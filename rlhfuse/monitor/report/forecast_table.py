"""Predicted and measured seconds of a training run's phases, as a table and as JSON values.

Reads what the trainer writes into metrics.jsonl: `timing_s/*` beside `forecast_s/*` (the iteration's lengths known) and
`forecast_blind_s/*` (unknown). The first iteration of a run, or after a restart, has no forecast.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhfuse.errors import InputError

NAMES = {
    "reshard": "weights moved",
    "gen": "generation",
    "infer": "inference beyond it",
    "adv": "advantages",
    "train": "training",
    "step": "whole iteration",
}
PHASES = tuple(NAMES)  # as in the metrics timing_s/*
PARTS = PHASES[:-1]


def forecast_key(phase: str, blind: bool = False) -> str:
    """The metric that holds a phase's prediction; `blind`: without knowing the iteration's lengths."""
    return f"forecast_{'blind_' if blind else ''}s/{phase}"


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
        """Of the phase's time, with the lengths known."""
        return self.off / self.measured if self.measured else 0.0

    @property
    def blind_error(self) -> float:
        """The same without them."""
        return self.blind_off / self.measured if self.measured else 0.0


@dataclass(frozen=True)
class ForecastTable:
    """The phases, the whole iteration last, over the iterations that hold a forecast."""

    iterations: tuple[int, ...]
    rows: tuple[PhaseRow, ...]

    @staticmethod
    def of(metrics: Sequence[Mapping[str, Any]], skip: int = 0) -> ForecastTable:
        """From metrics lines, without the first `skip` iterations. Raises InputError when no forecast is left."""
        lines = [line for line in metrics if forecast_key("step") in line and line["iteration"] >= skip]
        if not lines:
            raise InputError(
                "no iteration holds a forecast: it begins with the second iteration of a run; train some more"
            )
        return ForecastTable(tuple(line["iteration"] for line in lines), tuple(_row(phase, lines) for phase in PHASES))

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
        for row in self.rows:
            lines.append(
                f"{NAMES[row.phase]:20} {row.measured / count:7.3f} s {row.predicted / count:7.3f} s {row.error:7.1%}"
                f"   {row.blind / count:13.3f} s {row.blind_error:7.1%}"
            )
        lines.append(
            f"mean error {self.mean_error:.1%} with the iteration's lengths known, {self.blind_mean_error:.1%} without,"
            f" over {count} iterations"
        )
        return "\n".join(lines)

    def markdown(self) -> str:
        count = len(self.iterations)
        lines = ["| phase | measured | predicted | off by | lengths unknown | off by |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {NAMES[row.phase]} | {row.measured / count:.3f} s | {row.predicted / count:.3f} s | {row.error:.1%} "
            f"| {row.blind / count:.3f} s | {row.blind_error:.1%} |"
            for row in self.rows
        ]
        lines.append(f"| mean over the phases | | | **{self.mean_error:.1%}** | | {self.blind_mean_error:.1%} |")
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Sums of seconds over the iterations."""
        rows = [{**asdict(row), "error": row.error, "blind_error": row.blind_error} for row in self.rows]
        return {
            "iterations": list(self.iterations),
            "phases": rows,
            "mean_error": self.mean_error,
            "blind_mean_error": self.blind_mean_error,
        }


def _row(phase: str, lines: Sequence[Mapping[str, Any]]) -> PhaseRow:
    measured = [line[f"timing_s/{phase}"] for line in lines]
    sums: list[float] = []
    for blind in (False, True):
        predicted = [line[forecast_key(phase, blind)] for line in lines]
        sums += [sum(predicted), sum(abs(p - m) for p, m in zip(predicted, measured))]
    return PhaseRow(phase, sum(measured), *sums)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of a run directory's metrics.jsonl. Raises InputError."""
    path = Path(run) / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give the directory of a run") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
