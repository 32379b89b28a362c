"""Small pictures of a run's metrics as SVG text, to be put into a page.

Text stays text, and there are no dates and no random names in them: the same run gives the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from svg_text import SVG_STYLE, svg_text

from rlhfuse.monitor.phase_times import UTILISATION, number, phase_seconds
from rlhfuse.tasks.role import LEARNERS

_SIZE = (4.2, 2.3)  # inches
_MIDDLE, _WIDE = (5.6, 2.7), (8.4, 2.6)
_STYLE: dict[Any, Any] = SVG_STYLE | {"axes.titlesize": 10}
Rows = Sequence[dict[str, Any]]


def draw_curve(rows: Rows, curve: Curve) -> str:
    """A metric or several over the iterations; missing values are gaps."""
    values = curve.values(rows)
    figure, axes = _panel()
    for name, drawn in values.items():
        marker = "." if len(rows) < 60 or None in drawn else None  # a value between two gaps has no line
        axes.plot(_steps(rows), _gaps(drawn), linewidth=1.2, marker=marker, markersize=3, label=name)
    if len(values) > 1:
        axes.legend(frameon=False, fontsize=8)
    axes.ticklabel_format(axis="y", useOffset=False)
    return _svg(figure, axes, curve.title, curve.unit)


def score_chart(rows: Rows, evaluations: Rows) -> str:
    """The score of each iteration with the spread of its samples, and of held-out prompts with standard errors.

    Empty text where there is none.
    """
    means, spreads = ([number(row.get(f"critic/score/{part}")) for row in rows] for part in ("mean", "std"))
    tested = [row for row in evaluations if number(row["val/score/mean"]) is not None]
    if not tested and not any(mean is not None for mean in means):
        return ""
    figure, axes = _panel(_MIDDLE)
    steps, middle = _steps(rows), _gaps(means)
    line = axes.plot(steps, middle, linewidth=1.6, marker="." if len(rows) < 60 or None in means else None)[0]
    line.set_label("mean of an iteration's samples")
    if any(spread is not None for spread in spreads):
        low, high = ([mean + sign * std for mean, std in zip(middle, _gaps(spreads))] for sign in (-1, 1))
        label = "most samples: within one standard deviation"
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.18, linewidth=0, label=label)
    if tested:
        errors = [number(row.get("val/score/std_error")) or 0.0 for row in tested]
        held_out = [row["val/score/mean"] for row in tested]
        label = "held-out prompts, with one standard error"
        axes.errorbar(_steps(tested), held_out, errors, fmt="o", markersize=4, capsize=2, label=label)
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure, axes, "score", "score")


def phase_bars(rows: Rows) -> str:
    """Seconds of each phase, stacked, one bar an iteration."""
    figure, axes = _panel(_WIDE)
    below = [0.0] * len(rows)
    for label, values in phase_seconds(rows).items():
        axes.bar(_steps(rows), values, bottom=below, width=0.9, label=label)
        below = [low + value for low, value in zip(below, values)]
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure, axes, "seconds of every iteration", "seconds")


def threshold_history(rows: Rows) -> str:
    """R_t as a step line, and what it did: samples moved and samples scored before generation ended."""
    figure, axes = _panel(_WIDE)
    steps = _steps(rows)
    axes.step(steps, [row.get("fusion/threshold", 0) for row in rows], where="mid", color="black", label="R_t")
    for name, label in (
        ("fusion/migrated_samples", "samples moved"),
        ("fusion/scored_before_generation_end", "scored before generation ended"),
    ):
        axes.plot(steps, [row.get(name, 0) for row in rows], ".", markersize=4, label=label)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_ylim(bottom=0)
    return _svg(figure, axes, "R_t over the run", "samples")


def _panel(size: tuple[float, float] = _SIZE) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    with rc_context(_STYLE):
        return figure, figure.add_subplot()


def _steps(rows: Rows) -> list[int]:
    return [row["iteration"] for row in rows]


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _svg(figure: Figure, axes: Any, title: str, unit: str) -> str:
    axes.set_title(title, loc="left")
    axes.set_xlabel("iteration")
    axes.set_ylabel(unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return svg_text(figure)


NO_CRITIC = "no critic was trained"
NO_GUESSES = "no tokens were guessed"
GIB_PER_GB = 1e9 / 2**30


@dataclass(frozen=True)
class Curve:
    """One picture: `metrics` with what each is called in it, drawn times `factor`; `missing`: why there may be none."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    missing: str = "metrics.jsonl has no such key"
    factor: float = 1.0

    def values(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
        """By name, of those metrics that some row has; None where one has not, or no finite number."""
        found = {name: [number(row.get(metric)) for row in rows] for metric, name in self.metrics.items()}
        return {
            name: [value if value is None else self.factor * value for value in values]
            for name, values in found.items()
            if any(value is not None for value in values)
        }

    def why_not(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Why it has no value in these rows."""
        kept = any(metric in row for row in rows for metric in self.metrics)
        return "never a finite number" if kept else self.missing


CURVES = (
    Curve("score", "score", {"critic/score/mean": "mean", "critic/score/max": "best", "critic/score/min": "worst"}),
    Curve("KL to the reference", "nats per token", {"actor/ref_kl": "KL"}, "there is no reference model"),
    Curve("response length", "tokens", {"response_length/mean": "mean", "response_length/max": "longest"}),
    Curve("entropy", "nats per token", {"actor/entropy": "entropy"}),
    Curve("policy loss", "loss per token", {"actor/pg_loss": "policy loss"}),
    Curve("clipped tokens", "% of tokens", {"actor/pg_clipfrac": "actor", "critic/vf_clipfrac": "critic"}, factor=100),
    Curve("value loss", "loss per token", {"critic/vf_loss": "value loss"}, NO_CRITIC),
    Curve("explained variance of values", "share, 1 is all", {"critic/vf_explained_var": "values"}, NO_CRITIC),
    Curve("gradient norm", "norm before clipping", {f"{role}/grad_norm": role for role in LEARNERS}),
    Curve("learning rate", "per step", {f"{role}/lr": role for role in LEARNERS}),
    Curve(
        "log-probability, generation against training",
        "nats per token, mean |difference|",
        {"rollout/train_logprob_abs_diff": "difference"},
    ),
    Curve("speed", "samples per second", {"perf/samples_per_second": "speed"}),
    Curve("guessed tokens that were right", "% of guesses", {"speculation/accepted_share": "right"}, NO_GUESSES, 100),
    Curve("tokens of a sample in a step with guesses", "tokens", {"speculation/tokens_per_step": "tokens"}, NO_GUESSES),
    Curve("time saved by guesses", "seconds", {"speculation/seconds_saved": "saved"}, "no guesses with known costs"),
    Curve(
        "use of the hardware (MFU)",
        "% of peak FLOP/s",
        {metric: label for metric, label in UTILISATION.items() if metric != "perf/mfu/step"},
        "this machine's peak is not known",
        100,
    ),
    Curve(
        "peak memory of the fullest rank",
        "GiB",
        {f"perf/peak_memory_gb/{phase}": phase for phase in ("generation", "inference", "training")},
        factor=GIB_PER_GB,
    ),
)


def held_out_curve(evaluations: Sequence[Mapping[str, Any]]) -> Curve:
    """Mean score of the held-out prompts, and where there were several samples of each, of the best of them."""
    prefix = "val/score/"
    best = sorted({name for row in evaluations for name in row if name.startswith(f"{prefix}best@")})
    names = {f"{prefix}mean": "mean", **{name: name.removeprefix(prefix) for name in best}}
    return Curve("held-out score", "score", names, "there was no evaluation: data.val_files, trainer.eval_every")


def accepted_share(row: Mapping[str, Any]) -> dict[str, float]:
    """Share of an iteration's guesses that were right; nothing where there were none."""
    drafted = row.get("speculation/drafted")
    return {"speculation/accepted_share": row["speculation/accepted"] / drafted} if drafted else {}
