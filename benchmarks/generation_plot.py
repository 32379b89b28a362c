"""The curves of generation.py's case F as a picture: a decode step over the context and over the batch."""

from __future__ import annotations

import io
from typing import Any


def draw(curves: dict[str, Any]) -> bytes:
    """PNG with two panels, one line for each engine, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("by_context", "context", f"context, tokens (batch {curves['by_context'][0]['batch']})"),
        ("by_batch", "batch", f"batch, sequences (context {curves['by_batch'][0]['context']})"),
    )
    for number, (name, key, label) in enumerate(panels):
        axes = figure.add_subplot(1, 2, number + 1, xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        points = curves[name]
        for peer in points[0]["step_milliseconds"]:
            axes.plot(
                [point[key] for point in points],
                [point["step_milliseconds"][peer] for point in points],
                marker="o",
                label=peer,
            )
        axes.set_xlabel(label)
        axes.set_ylabel("milliseconds of a decode step")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
