"""Memory against time: the tables that nothing beats in both, of those that a search has priced."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rlhfuse.planning.search.search import Row


def memory_curve(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The fastest first; each next one needs less of a rank."""
    curve: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.seconds, row.needed_bytes, row.table.text)):
        if not curve or row.needed_bytes < curve[-1].needed_bytes:
            curve.append(row)
    return tuple(curve)


def draw_memory_curve(rows: Sequence[Row], curve: Sequence[Row]) -> bytes:
    """A PNG with the curve before all priced tables."""
    from matplotlib import rc_context  # takes a second that a search without a picture need not wait for
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        axes.scatter(*_points(rows), s=12, color="#9ecae1", label="priced")
        axes.plot(*_points(curve), drawstyle="steps-post", marker="o", color="#08519c", label="none is better in both")
        for number, row in enumerate(curve, start=1):
            place = row.needed_bytes / 1e9, row.seconds
            axes.annotate(str(number), place, xytext=(0, -11), textcoords="offset points", ha="center")
            axes.plot([], [], " ", label=f"{number}  {_short(row)}")
        axes.set_xlabel("peak memory of a rank, 10^9 bytes")
        axes.set_ylabel("predicted seconds of an iteration")
        axes.legend(frameon=False, fontsize=7)
        axes.margins(0.15)
        stream = io.BytesIO()
        FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.needed_bytes / 1e9 for row in rows], [row.seconds for row in rows]


def _short(row: Row) -> str:
    table = row.table
    return f"{table.generation} / {table.actor_train} {table.critic_train or ''}".strip()
