"""What every rank did and when, as a Chrome trace and as a picture.

A `Span` is one piece of work of one rank. Spans are saved in Chrome's trace format, which Perfetto (ui.perfetto.dev)
opens: one process for what was measured, one for what was predicted, a thread per rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_text
from rlhfuse.base.json_values import from_json, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = ("predicted", "measured")
_MICROSECONDS = 1e6  # the unit of Chrome traces


@dataclass(frozen=True)
class Span:
    """One piece of work; `args` are facts shown when it is clicked, of JSON types."""

    name: str
    kind: str  # generate, migrate, score, reshard, actor F, critic B ...
    rank: int
    start_seconds: float
    end_seconds: float
    group: str = "measured"
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise InputError(f"span {self.name}: group {self.group!r} is not one of {', '.join(GROUPS)}")
        if self.end_seconds < self.start_seconds:
            raise InputError(f"span {self.name}: ends at {self.end_seconds} s, before {self.start_seconds} s")


def save_trace(spans: Sequence[Span], path: str | Path) -> None:
    """Write a Chrome trace beside `path` and rename it into place. Raises InputError where that fails."""
    tracks = sorted({(GROUPS.index(span.group), span.rank) for span in spans})
    names = [("process_name", pid, 0, GROUPS[pid]) for pid in sorted({pid for pid, _ in tracks})]
    names += [("thread_name", pid, rank, f"rank {rank}") for pid, rank in tracks]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}} for kind, pid, tid, name in names
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": GROUPS.index(span.group),
            "tid": span.rank,
            "ts": span.start_seconds * _MICROSECONDS,
            "dur": (span.end_seconds - span.start_seconds) * _MICROSECONDS,
            "args": span.args,
        }
        for span in sorted(spans, key=lambda span: (span.group, span.rank, span.start_seconds))
    ]
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def load_trace(path: str | Path) -> list[Span]:
    """The spans of a file written by `save_trace`, times exact to the nanosecond. Raises InputError."""
    raw = read_json(path, fix="a run writes it as trace.json")
    try:
        spans = [
            {
                "name": event["name"],
                "kind": event["cat"],
                "rank": event["tid"],
                "start_seconds": event["ts"] / _MICROSECONDS,
                "end_seconds": (event["ts"] + event["dur"]) / _MICROSECONDS,
                "group": GROUPS[event["pid"]],
                "args": event["args"],
            }
            for event in raw["traceEvents"]
            if event["ph"] == "X"
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(f"{path} is not a trace written by this program ({type(error).__name__}: {error})") from None
    return from_json(list[Span], spans, str(path))


def draw_iteration(spans: Sequence[Span], path: str | Path, title: str = "") -> None:
    """Draw the spans of one iteration into a file; its format follows the suffix of `path` (.png, .svg, .pdf)."""
    if not spans:
        raise InputError(f"nothing to draw in {path}: the trace holds no spans of this iteration")
    beside = Path(path).with_name("." + Path(path).name)  # keeps the suffix, which names the format
    iteration_figure(spans, title).savefig(beside, dpi=150)
    os.replace(beside, path)


def iteration_figure(spans: Sequence[Span], title: str = "") -> Figure:
    """The spans of one iteration as one row per rank (predicted above measured), coloured by kind."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: a run without pictures should not load it
    from matplotlib.figure import Figure

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
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.3)
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
