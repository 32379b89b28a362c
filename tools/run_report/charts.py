"""Small pictures of a run's metrics as SVG text, to be put into a page.

Text stays text, and there are no dates and no random names in them: the same run gives the same picture.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from run_report.curves import Curve

from rlhfuse.monitor.phase_times import number, phase_seconds

_SIZE = (4.2, 2.3)  # inches
_MIDDLE, _WIDE = (5.6, 2.7), (8.4, 2.6)
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "rlhfuse", "font.size": 9, "axes.titlesize": 10}
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


def svg_text(figure: Figure) -> str:
    """The figure as an <svg> element without a background, whose black is the page's colour of text."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return inline(out.getvalue()).replace("#000000", "currentColor")


def inline(svg: str) -> str:
    """The <svg> element alone, without the declarations of a file of its own."""
    return svg[svg.index("<svg") :]
