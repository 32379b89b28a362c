"""Charts of the reproduction page and of results pages: <svg> elements with lines and words in the page's colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from svg_text import SVG_STYLE, svg_text

INK = "#010203"  # becomes the colour of the text around the picture
COLOURS = ("#3b82c4", "#d9577a", "#3f9e5a", "#d9822b", "#8a63c9", "#7a8793")  # to be seen on light and on dark
STYLE: Any = {
    **SVG_STYLE,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}

Points = Sequence[tuple[float, float]]


def lines(panels: Mapping[str, Mapping[str, Points]], x: str, y: str, marks: Mapping[str, float]) -> str:
    """One panel beside the other; `marks`: vertical lines with their names."""
    with rc_context(STYLE):
        picture = Figure(figsize=(3.6 * len(panels), 2.8), layout="constrained")
        for number, (title, curves) in enumerate(panels.items()):
            axes = picture.add_subplot(1, len(panels), number + 1)
            for colour, (label, points) in zip(COLOURS, curves.items()):
                axes.plot(*zip(*points), marker=".", color=colour, label=label)
            for label, value in marks.items():
                axes.axvline(value, color=INK, linestyle=":", linewidth=1, label=label)
            axes.set_ylim(bottom=0)
            _dress(axes, title, x, y if number == 0 else "")
        return svg_text(picture, INK)


def scatter(groups: Mapping[str, Points], x: str, y: str) -> str:
    """Points over logarithmic axes, with the line on which both are equal."""
    with rc_context(STYLE):
        picture = Figure(figsize=(5, 3.6), layout="constrained")
        axes = picture.add_subplot(xscale="log", yscale="log")
        every = [value for points in groups.values() for point in points for value in point]
        axes.plot([min(every), max(every)], [min(every), max(every)], color=INK, linestyle=":", linewidth=1)
        for colour, (label, points) in zip(COLOURS, groups.items()):
            axes.scatter(*zip(*points), color=colour, label=label, s=18)
        _dress(axes, "", x, y)
        return svg_text(picture, INK)


def stacked_pairs(groups: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]], y: str) -> str:
    """For each name two stacked bars beside each other; a part has one colour in all."""
    with rc_context(STYLE):
        picture = Figure(figsize=(max(6.0, 0.95 * len(groups)), 3.2), layout="constrained")
        axes = picture.add_subplot()
        parts = list(dict.fromkeys(part for pair in groups.values() for bar in pair for part in bar))
        for place, pair in enumerate(groups.values()):
            for side, bar in enumerate(pair):
                below = 0.0
                for part, value in bar.items():
                    colour = COLOURS[parts.index(part)]
                    axes.bar(place + 0.4 * side - 0.2, value, 0.36, bottom=below, color=colour)
                    below += value
        for colour, part in zip(COLOURS, parts):
            axes.bar(0, 0, color=colour, label=part)
        axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
        _dress(axes, "", "", y)
        return svg_text(picture, INK)


def bars_in_ranges(panels: Mapping[str, Mapping[str, float]], ranges: Mapping[str, tuple[float, float]], y: str) -> str:
    """A panel for each of `ranges`, which is shaded, with a bar for each name, from 1 on."""
    with rc_context(STYLE):
        picture = Figure(figsize=(3.2 * len(panels), 2.8), layout="constrained")
        for number, (title, values) in enumerate(panels.items()):
            axes = picture.add_subplot(1, len(panels), number + 1)
            low, high = ranges[title]
            axes.axhspan(low, high, color=COLOURS[-1], alpha=0.25, linewidth=0, label=f"paper: {low} to {high}")
            axes.bar(range(len(values)), [value - 1 for value in values.values()], 0.6, bottom=1, color=COLOURS[0])
            axes.axhline(1, color=INK, linewidth=0.8)
            axes.set_xticks(range(len(values)), list(values), fontsize=7)
            axes.set_ylim(0.9, max(high, *values.values()) + 0.1)
            _dress(axes, title, "", y if number == 0 else "")
        return svg_text(picture, INK)


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7)
