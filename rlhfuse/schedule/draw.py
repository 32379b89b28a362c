"""A schedule as a picture (timeline above, activation memory below) and as a Chrome trace.

Forwards are light, backwards dark, one hue per model, one row per node, as in the paper's Figure 10;
the red dotted line is the peak memory of training the models one after the other with 1F1B.
"""

from __future__ import annotations

import io
import json

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlhfuse.schedule.bounds import latency_bound
from rlhfuse.schedule.builders import serial_peak_memory
from rlhfuse.schedule.evaluate import Timeline, evaluate, memory_profile
from rlhfuse.schedule.schedule import Schedule

# (forward, backward, weight gradient) of the first, second, ... model
_HUES = (
    ("#9ecae1", "#3182bd", "#08519c"),
    ("#fbb4c4", "#e0567a", "#a11245"),
    ("#a1d99b", "#41ab5d", "#006d2c"),
    ("#fdd0a2", "#f16913", "#a63603"),
)
_KINDS = ("F", "B", "W")


def draw_schedule(schedule: Schedule, file_format: str) -> bytes:
    """The picture as `file_format` ("png" or "svg"). Raises ScheduleError when the schedule deadlocks."""
    timeline = evaluate(schedule)
    nodes = schedule.problem.nodes
    figure = Figure(figsize=(14, 3.5 + 0.25 * nodes), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(max(2, nodes), max(2, nodes / 2)))
    _draw_time(above, schedule, timeline)
    _draw_memory(below, schedule, timeline)
    out = io.BytesIO()
    # Without a date the same schedule gives the same picture.
    metadata = {"Date": None} if file_format == "svg" else None
    figure.savefig(out, format=file_format, dpi=110, metadata=metadata)
    return out.getvalue()


def _draw_time(axes, schedule: Schedule, timeline: Timeline) -> None:
    models = schedule.problem.models
    model_of = {pipeline.name: models.index(pipeline.model) for pipeline in schedule.problem.pipelines}
    for node, order in enumerate(schedule.orders):
        bars: dict[str, list[tuple]] = {}
        for action, start, end in zip(order, timeline.starts[node], timeline.ends[node]):
            colour = _HUES[model_of[action.pipeline] % len(_HUES)][_KINDS.index(action.kind)]
            bars.setdefault(colour, []).append((start, end - start))
        for colour, spans in bars.items():
            axes.broken_barh(spans, (node - 0.45, 0.9), facecolors=colour, edgecolors="white", linewidth=0.3)
    bound = latency_bound(schedule.problem)
    axes.axvline(bound, color="black", linestyle=":", linewidth=1)
    axes.set_title(f"makespan {timeline.makespan:g}, lower bound {bound:g}", fontsize=10)
    axes.set_ylabel("node")
    axes.set_yticks(range(schedule.problem.nodes))
    axes.invert_yaxis()
    labels = ("forward", "backward", "weight gradient")
    kinds = 3 if any(pipeline.split for pipeline in schedule.problem.pipelines) else 2
    patches = [
        Patch(color=_HUES[i % len(_HUES)][k], label=f"{model} {labels[k]}")
        for i, model in enumerate(models)
        for k in range(kinds)
    ]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _draw_memory(axes, schedule: Schedule, timeline: Timeline) -> None:
    """A forward takes its memory when it starts; the last backward kind gives it back when it ends."""
    for node, order in enumerate(schedule.orders):
        profile = memory_profile(schedule, node)
        times, levels = [0], [0]
        for action, start, end, level in zip(order, timeline.starts[node], timeline.ends[node], profile):
            times.append(start if action.kind == "F" else end)
            levels.append(level)
        times.append(timeline.makespan)
        levels.append(levels[-1])
        axes.step(times, levels, where="post", linewidth=0.8, color=f"{0.7 * node / max(1, len(schedule.orders)):.2f}")
    axes.axhline(serial_peak_memory(schedule.problem), color="red", linestyle=":", linewidth=1.2)
    axes.set_ylabel("activation memory per node")
    axes.set_xlabel("time")
    axes.set_title(f"peak {timeline.peak_memory:g}, serial 1F1B {serial_peak_memory(schedule.problem):g}", fontsize=10)


def chrome_trace(schedule: Schedule) -> str:
    """The timeline for chrome://tracing or Perfetto: one thread per node, one time unit shown as a microsecond."""
    timeline = evaluate(schedule)
    events: list[dict] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": node, "args": {"name": f"node {node}"}}
        for node in range(schedule.problem.nodes)
    ]
    for node, order in enumerate(schedule.orders):
        for action, start, end in zip(order, timeline.starts[node], timeline.ends[node]):
            events.append(
                {
                    "name": str(action),
                    "cat": schedule.problem.pipeline(action.pipeline).model,
                    "ph": "X",
                    "pid": 0,
                    "tid": node,
                    "ts": start,
                    "dur": end - start,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
