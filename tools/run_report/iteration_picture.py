"""What every rank did in one iteration, measured and predicted, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlhfuse.base.clock import GROUPS, Span


def iteration_figure(spans: Sequence[Span], title: str = "") -> Figure:
    """The spans of one iteration as one row per rank (predicted above measured), coloured by kind."""
    rows = sorted({(GROUPS.index(span.group), span.rank) for span in spans}, reverse=True)
    kinds = list(dict.fromkeys(span.kind for span in sorted(spans, key=lambda span: span.start_seconds)))
    start = min(span.start_seconds for span in spans)
    columns = 1 + (len(kinds) > 2 * len(rows) + 3)
    height = max(0.9 + 0.36 * len(rows), 0.3 + 0.24 * -(-len(kinds) // columns))  # the legend's
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # the strong shades of the paired palette first, then their light ones
    colours = {kind: colormaps["tab20"]((2 * n) % 20 + (n // 10) % 2) for n, kind in enumerate(kinds)}
    for kind, colour in colours.items():
        for row, (group, rank) in enumerate(rows):
            bars = [
                (span.start_seconds - start, span.end_seconds - span.start_seconds)
                for span in spans
                if span.kind == kind and span.rank == rank and GROUPS.index(span.group) == group
            ]
            bottom, thickness = row - 0.4, 0.15 if kind == "call" else 0.8  # calls of tools run beside the rest
            axes.broken_barh(bars, (bottom, thickness), facecolors=colour, edgecolors="white", linewidth=0.3)
    both = len({group for group, _ in rows}) > 1
    labels = [f"rank {rank}" + (f" {GROUPS[group]}" if both else "") for group, rank in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlabel("seconds")
    axes.set_title(title)
    handles = [axes.barh(0, 0, color=colour, label=kind) for kind, colour in colours.items()]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, ncols=columns)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
