"""A schedule as a picture (timeline above, memory of each node below) and as a Chrome trace.

Forwards are light, backwards dark, one hue per model, one row per node, as in the paper's Figure 10. Memory is stacked
by model on the static memory; the red dotted line is the peak of serial 1F1B, the black one the memory cap.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlhfuse.schedule.bounds.bounds import latency_bound, memory_bound
from rlhfuse.schedule.ir.evaluate import Timeline, evaluate, memory_profile
from rlhfuse.schedule.ir.graph import kinds_of, memory_of
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory

# (forward, backward, weight gradient) of the first, second, ... model
_HUES = (
    ("#9ecae1", "#3182bd", "#08519c"),
    ("#fbb4c4", "#e0567a", "#a11245"),
    ("#a1d99b", "#41ab5d", "#006d2c"),
    ("#fdd0a2", "#f16913", "#a63603"),
)
_KINDS = ("F", "B", "W")
_STATIC = "#d9d9d9"
_WIDTH_INCHES, _DPI = 14.0, 110
_MOST_VECTOR_TASKS = 20_000  # more of them are drawn as an image in an SVG
_BAR = 0.88  # of a row's height


@dataclass(frozen=True)
class View:
    """The part to draw: nodes `first` to `last`, times `begin` to `end`, neither empty."""

    first: int
    last: int
    begin: float
    end: float

    @property
    def nodes(self) -> range:
        return range(self.first, self.last + 1)

    def shows(self, start: float, end: float) -> bool:
        """Whether a task from `start` to `end` is to be seen."""
        return start < self.end and end > self.begin


def whole(schedule: Schedule, timeline: Timeline) -> View:
    """All of it."""
    return View(0, schedule.problem.nodes - 1, 0, float(timeline.makespan))


def draw_schedule(schedule: Schedule, file_format: str, view: View | None = None) -> bytes:
    """The picture as `file_format` ("png" or "svg"). Raises ScheduleError when the schedule deadlocks."""
    timeline = evaluate(schedule)
    view = view or whole(schedule, timeline)
    rows = len(view.nodes)
    row_inches = max(0.13, min(0.3, 9 / rows))
    figure = Figure(figsize=(_WIDTH_INCHES, 1.9 + 2 * max(3, rows) * row_inches), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, sharey=True)
    _draw_time(above, schedule, timeline, view)
    _draw_memory(below, schedule, timeline, view)
    below.set_xlim(view.begin, view.end)
    below.set_ylim(view.last + 0.5, view.first - 0.5)  # node 0 on top
    for axes in (above, below):
        _dress(axes, view)
    return _picture(figure, file_format)


def draw_timelines(schedules: Mapping[str, Schedule], file_format: str) -> bytes:
    """The timelines of several schedules below each other, on one scale of time; each has its key in its title."""
    timelines = {name: evaluate(schedule) for name, schedule in schedules.items()}
    end = max(float(timeline.makespan) for timeline in timelines.values())
    rows = [schedule.problem.nodes for schedule in schedules.values()]
    row_inches = max(0.1, min(0.26, 9 / sum(rows)))
    figure = Figure(figsize=(_WIDTH_INCHES, 0.7 * len(rows) + sum(rows) * row_inches), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (name, schedule) in zip(panels, schedules.items()):
        view = View(0, schedule.problem.nodes - 1, 0, end)
        _draw_time(axes, schedule, timelines[name], view)
        axes.set_title(f"{name}: {axes.get_title(loc='left')}", fontsize=10, loc="left")
        axes.set_xlim(0, end)
        axes.set_ylim(view.last + 0.5, -0.5)
        _dress(axes, view)
        if axes is not panels[-1]:
            axes.legend_.remove()
    panels[-1].set_xlabel("time")
    return _picture(figure, file_format)


def _dress(axes: Axes, view: View) -> None:
    rows = len(view.nodes)
    step = 1 if rows <= 24 else 4 if rows <= 64 else 8
    axes.set_yticks([node for node in view.nodes if node % step == 0])
    axes.set_ylabel("node")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _picture(figure: Figure, file_format: str) -> bytes:
    out = io.BytesIO()
    # Without a date and random names the same schedule gives the same picture.
    metadata = {"Date": None} if file_format == "svg" else None
    with rc_context({"svg.hashsalt": "rlhfuse"}):
        figure.savefig(out, format=file_format, dpi=_DPI, metadata=metadata)
    return out.getvalue()


def _draw_time(axes: Axes, schedule: Schedule, timeline: Timeline, view: View) -> None:
    problem = schedule.problem
    boxes, labels = _bars(schedule, timeline, view)
    tasks = sum(len(group) for group in boxes.values())
    wide = len(view.nodes) * _WIDTH_INCHES * _DPI > 6 * tasks  # pixels enough for a line between two tasks
    for colour, group in boxes.items():
        bars = PolyCollection(list(np.array(group)), facecolors=colour, linewidths=0.4 if wide else 0)
        if wide:
            bars.set_edgecolor("white")
        bars.set_rasterized(tasks > _MOST_VECTOR_TASKS)
        axes.add_collection(bars)
    _draw_numbers(axes, labels, view)
    bound, serial = latency_bound(problem), serial_makespan(problem)
    axes.axvline(bound, color="black", linestyle=":", linewidth=1)
    axes.set_title(
        f"makespan {timeline.makespan:g}   lower bound {bound:g} ({gap(timeline.makespan, bound)})   "
        f"serial 1F1B {serial:g} ({serial / timeline.makespan:.3f} times as long)",
        fontsize=10,
        loc="left",
    )
    axes.legend(handles=_task_legend(problem), loc="upper left", bbox_to_anchor=(1.03, 1), fontsize=8, frameon=False)


def _bars(schedule: Schedule, timeline: Timeline, view: View) -> tuple[dict[str, list], list[tuple]]:
    """Rectangles by colour, and (middle, node, length, micro-batch, light) of what is seen of each task."""
    models = schedule.problem.models
    model_of = {pipeline.name: models.index(pipeline.model) for pipeline in schedule.problem.pipelines}
    boxes: dict[str, list] = {}
    labels = []
    for node in view.nodes:
        top, bottom = node - _BAR / 2, node + _BAR / 2
        for action, start, end in zip(schedule.orders[node], timeline.starts[node], timeline.ends[node]):
            if view.shows(start, end):
                kind = _KINDS.index(action.kind)
                colour = _HUES[model_of[action.pipeline] % len(_HUES)][kind]
                boxes.setdefault(colour, []).append(((start, top), (end, top), (end, bottom), (start, bottom)))
                seen = max(start, view.begin), min(end, view.end)
                labels.append((sum(seen) / 2, node, seen[1] - seen[0], str(action.microbatch), kind == 0))
    return boxes, labels


def _draw_numbers(axes: Axes, labels: list[tuple], view: View) -> None:
    """The micro-batch in every task that is long enough for the longest number."""
    digits = max((len(text) for *_, text, _ in labels), default=1)
    shortest = (5 * digits + 2) * (view.end - view.begin) / (0.8 * _WIDTH_INCHES * _DPI)
    if len(view.nodes) > 32 or len(labels) > _MOST_VECTOR_TASKS:
        return
    for middle, node, length, text, light in labels:
        if length >= shortest:
            colour = "black" if light else "white"
            axes.text(middle, node, text, ha="center", va="center", fontsize=5.5, color=colour, clip_on=True)


def _task_legend(problem: FusionProblem) -> list[Patch | Line2D]:
    names = ("forward", "backward", "weight gradient")
    handles: list[Patch | Line2D] = []
    for i, model in enumerate(problem.models):
        kinds = max(len(kinds_of(pipeline)) for pipeline in problem.pipelines if pipeline.model == model)
        handles += [Patch(color=_HUES[i % len(_HUES)][k], label=f"{model} {names[k]}") for k in range(kinds)]
    return handles + [Line2D([], [], color="black", linestyle=":", linewidth=1, label="latency bound")]


@dataclass(frozen=True)
class _Lanes:
    """What the memory lanes have in common: static memory and cap of each node, serial peak, full height."""

    static: list[float]
    caps: list[float]  # empty without a cap, and with one so high that it would press the lanes flat
    serial: float
    full: float

    @staticmethod
    def of(problem: FusionProblem, timeline: Timeline) -> _Lanes:
        nodes = range(problem.nodes)
        static = [float(problem.node_static(node)) for node in nodes]
        serial = float(serial_peak_memory(problem))
        used = max(max(timeline.node_peak_memory[node], serial) + static[node] for node in nodes)
        caps = [problem.node_cap(node) + static[node] for node in nodes]
        if max(caps) > 3 * used:
            caps = []
        return _Lanes(static, caps, serial, max([used, *caps]))

    def height(self, node: int, memory):
        """Where in the lane of `node` an amount of memory, static included, is drawn."""
        return node + _BAR / 2 - memory * _BAR / self.full


def _draw_memory(axes: Axes, schedule: Schedule, timeline: Timeline, view: View) -> None:
    """One lane per node, all on the same scale."""
    problem = schedule.problem
    lanes = _Lanes.of(problem, timeline)
    crowded = sum(len(schedule.orders[node]) for node in view.nodes) > _MOST_VECTOR_TASKS
    size = 7 if len(view.nodes) <= 32 else 5
    for node in view.nodes:
        static, (times, levels) = lanes.static[node], _held(schedule, timeline, node)
        edges = [np.zeros(len(times)), *(static + np.cumsum(np.vstack([np.zeros(len(times)), levels]), axis=0))]
        for colour, below, above in zip([_STATIC, *_model_colours(problem)], edges, edges[1:]):
            low, high = lanes.height(node, below), lanes.height(node, above)
            area = axes.fill_between(times, low, high, step="post", color=colour, linewidth=0)
            area.set_rasterized(crowded)
            area.set_antialiased(not crowded)  # thousands of steps of less than a pixel would fade
        axes.annotate(
            f"{timeline.node_peak_memory[node]:g}",
            (1, node),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=size,
            annotation_clip=False,
        )
    for levels, colour, linestyle in (
        ([static + lanes.serial for static in lanes.static], "red", ":"),
        (lanes.caps, "black", "-"),
    ):
        heights = [lanes.height(node, levels[node]) for node in view.nodes if levels]
        lines = [[(view.begin, y), (view.end, y)] for y in heights]
        axes.add_collection(LineCollection(lines, linewidths=0.8, colors=colour, linestyles=linestyle))
    bound = memory_bound(problem, timeline.makespan)
    axes.set_title(
        f"activation memory: peak {timeline.peak_memory:g}   lower bound {bound:g} "
        f"({gap(timeline.peak_memory, bound)})   serial 1F1B {lanes.serial:g}",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("time")
    handles = _memory_legend(problem, lanes)
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.03, 1), fontsize=8, frameon=False)


def _model_colours(problem: FusionProblem) -> list[str]:
    """One light colour per model."""
    return [_HUES[i % len(_HUES)][0] for i in range(len(problem.models))]


def _memory_legend(problem: FusionProblem, lanes: _Lanes) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=model) for colour, model in zip(_model_colours(problem), problem.models)
    ]
    if max(lanes.static) > 0:
        handles.append(Patch(color=_STATIC, label="static"))
    handles.append(Line2D([], [], color="red", linestyle=":", linewidth=1, label="serial 1F1B"))
    if lanes.caps:
        handles.append(Line2D([], [], color="black", linewidth=0.8, label="memory cap"))
    return handles


def _held(schedule: Schedule, timeline: Timeline, node: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of change and, per model, the activation memory from then on: float64[t], float64[models, t].

    What an action takes it takes when it starts, and what it gives back it gives back when it ends.
    """
    problem = schedule.problem
    pipelines = {pipeline.name: pipeline for pipeline in problem.pipelines}
    order = schedule.orders[node]
    times = np.zeros(len(order) + 2)
    change = np.zeros((len(problem.models), len(order) + 2))
    for i, (action, start, end) in enumerate(zip(order, timeline.starts[node], timeline.ends[node]), 1):
        pipeline = pipelines[action.pipeline]
        taken = memory_of(pipeline, action.kind, action.stage)
        times[i] = start if taken > 0 else end
        change[problem.models.index(pipeline.model), i] = taken
    times[-1] = timeline.makespan
    return times, np.cumsum(change, axis=1)


def gap(value: float, bound: float) -> str:
    """How far a figure is above its bound, in words."""
    if value <= bound * (1 + 1e-9):
        return "reached"
    return f"{value / bound - 1:.2%} above" if bound > 0 else "above"


def chrome_trace(schedule: Schedule) -> str:
    """The timeline for chrome://tracing or Perfetto: one thread per node, one time unit shown as a microsecond.

    A counter beside each node has its activation memory.
    """
    timeline = evaluate(schedule)
    events: list[dict] = []
    for node, order in enumerate(schedule.orders):
        named = {"pid": 0, "tid": node}
        events.append({"name": "thread_name", "ph": "M", **named, "args": {"name": f"node {node}"}})
        held = 0
        profile = memory_profile(schedule, node)
        for action, start, end, level in zip(order, timeline.starts[node], timeline.ends[node], profile):
            model = schedule.problem.pipeline(action.pipeline).model
            events.append({"name": str(action), "cat": model, "ph": "X", **named, "ts": start, "dur": end - start})
            if level != held:
                at = start if level > held else end
                counter = {"name": f"memory {node}", "ph": "C", **named, "ts": at, "args": {"activations": level}}
                events.append(counter)
            held = level
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
