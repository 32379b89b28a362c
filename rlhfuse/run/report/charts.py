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

from rlhfuse.run.report.phase_times import PHASES

_SIZE = (4.2, 2.3)  # inches
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "rlhfuse", "font.size": 8, "axes.titlesize": 9}
Rows = Sequence[dict[str, Any]]


def curve(rows: Rows, metrics: Sequence[str], title: str) -> str:
    """One or more metrics over the iterations; missing values are gaps. Empty text where no row has any."""
    drawn = [name for name in metrics if any(_number(row.get(name)) is not None for row in rows)]
    if not drawn:
        return ""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    steps = [row["iteration"] for row in rows]
    for name in drawn:
        values = [_number(row.get(name)) for row in rows]
        gaps = [math.nan if value is None else value for value in values]
        marker = "." if len(rows) < 60 or None in values else None  # a value between two gaps has no line
        axes.plot(steps, gaps, linewidth=1.2, marker=marker, markersize=3, label=name)
    if len(drawn) > 1:
        axes.legend(frameon=False, fontsize=7)
    return _svg(figure, axes, title)


def phase_bars(rows: Rows) -> str:
    """Seconds of each phase, stacked, one bar an iteration."""
    figure = Figure(figsize=(2 * _SIZE[0], _SIZE[1]), layout="constrained")
    axes = figure.add_subplot()
    steps, below = [row["iteration"] for row in rows], [0.0] * len(rows)
    parts = {label: [_number(row.get(name)) or 0.0 for row in rows] for name, label in PHASES.items()}
    known = [sum(values) for values in zip(*parts.values())]
    whole = [sum(_number(row.get(f"timing_s/{part}")) or 0.0 for part in ("step", "books", "eval")) for row in rows]
    parts["other"] = [max(seconds - had, 0.0) for seconds, had in zip(whole, known)]
    for label, values in parts.items():
        axes.bar(steps, values, bottom=below, width=0.9, label=label)
        below = [low + value for low, value in zip(below, values)]
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_ylabel("seconds")
    return _svg(figure, axes, "where the time went")


def threshold_history(rows: Rows) -> str:
    """R_t as a step line, and what it did: samples moved and samples scored before generation ended."""
    figure = Figure(figsize=(2 * _SIZE[0], _SIZE[1]), layout="constrained")
    axes = figure.add_subplot()
    steps = [row["iteration"] for row in rows]
    axes.step(steps, [row.get("fusion/threshold", 0) for row in rows], where="mid", color="black", label="R_t")
    for name, label in (
        ("fusion/migrated_samples", "samples moved"),
        ("fusion/scored_before_generation_end", "scored before generation ended"),
    ):
        axes.plot(steps, [row.get(name, 0) for row in rows], ".", markersize=4, label=label)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_ylabel("samples")
    axes.set_ylim(bottom=0)
    return _svg(figure, axes, "R_t over the run")


def _svg(figure: Figure, axes: Any, title: str) -> str:
    axes.set_title(title, loc="left")
    axes.set_xlabel("iteration")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return svg_text(figure)


def svg_text(figure: Figure) -> str:
    """The figure as an <svg> element."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return inline(out.getvalue())


def inline(svg: str) -> str:
    """The <svg> element alone, without the declarations of a file of its own."""
    return svg[svg.index("<svg") :]


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
