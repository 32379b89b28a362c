"""Latency over memory cap: the fastest schedule found under each of some caps, with its bound, as table and picture.

Caps go from the least possible to what the fastest schedule takes without one. Each search begins with the schedule of
the cap below, which fits; the ranks of an MPI job take a run of neighbours each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from text_table import aligned

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate, tidy
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.schedule.search.library import Library
from rlhfuse.schedule.search.search import SearchObserver, SearchReport, SearchSettings, search

HEAD = ("memory cap", "makespan", "bound", "above bound", "peak memory")


@dataclass(frozen=True)
class CapPoint:
    """What was found under `cap`, memory of a node with what is static."""

    cap: Number
    bound: Number
    makespan: Number
    schedule: Schedule
    peak_memory: Number  # of activations


def sweep(
    problem: FusionProblem,
    settings: SearchSettings,
    count: int,
    library: Library,
    comm: Any = None,
    observer: SearchObserver | None = None,
    tell: Callable[[CapPoint], None] = lambda point: None,
) -> list[CapPoint]:
    """Points of `count` caps, ascending, the same on every rank; `settings` are those of each search.

    A signal that `observer` tells of leaves out what was not searched yet. Each rank is told of its own points.
    """
    observer = observer or SearchObserver()
    rank, ranks = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)
    free = replace(problem, memory_cap=None)
    fastest, found = search(free, replace(settings, objective="memory"), comm=comm, observer=_Quiet(observer))
    own, start = [], None
    every = caps(problem, found, count)
    for cap in np.array_split(every, ranks)[rank].tolist():
        capped = replace(problem, memory_cap=tidy(cap))
        if observer.stop():
            break
        known = library.find(capped) if settings.iterations is None else None
        fitting = known, start, fastest if cap == every[-1] else None
        start = min(filter(None, fitting), key=_makespan, default=None)
        schedule, report = search(capped, settings, start=start, observer=_Quiet(observer))
        library.keep(schedule)
        own.append(CapPoint(tidy(cap), latency_bound(capped), report.makespan, schedule, report.peak_memory))
        tell(own[-1])
        start = schedule
    points = own if comm is None else [point for part in comm.allgather(own) for point in part]
    return none_slower(points)


class _Quiet(SearchObserver):
    """Passes on who asks for a stop, and no news."""

    def __init__(self, observer: SearchObserver) -> None:
        self.stop = observer.stop


def caps(problem: FusionProblem, fastest: SearchReport, count: int) -> np.ndarray:
    """float64[count], evenly from the least cap under which there is a schedule to the fastest one's peak."""
    static = [float(problem.node_static(node)) for node in range(problem.nodes)]
    least = max(held + needed for held, needed in zip(static, min_memory(problem)))
    return np.linspace(least, max(least, max(static) + float(fastest.peak_memory)), count)


def none_slower(points: Sequence[CapPoint]) -> list[CapPoint]:
    """The points with the schedule of a smaller cap, which fits as well, where that is faster."""
    made: list[CapPoint] = []
    for point in points:
        if made and made[-1].makespan < point.makespan:
            below = made[-1]
            schedule = Schedule(point.schedule.problem, below.schedule.orders)
            point = replace(point, makespan=below.makespan, schedule=schedule, peak_memory=below.peak_memory)
        made.append(point)
    return made


def _makespan(schedule: Schedule) -> Number:
    return evaluate(schedule).makespan


def sweep_table(points: Sequence[CapPoint]) -> str:
    """A line for each cap."""
    rows = [
        (
            *(f"{value:.6g}" for value in (point.cap, point.makespan, point.bound)),
            f"{point.makespan / point.bound - 1:.1%}",
            f"{point.peak_memory:g}",
        )
        for point in points
    ]
    return "\n".join(aligned((HEAD, *rows), left=()))


def sweep_svg(points: Sequence[CapPoint]) -> str:
    """Makespan and bound over the cap."""
    from matplotlib.figure import Figure  # takes a second that a search without a picture need not wait for
    from svg_text import svg_text

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    cap = [float(point.cap) for point in points]
    axes.plot(cap, [float(point.makespan) for point in points], marker="o", color="#08519c", label="fastest found")
    axes.plot(cap, [float(point.bound) for point in points], linestyle="--", color="#e0567a", label="proved bound")
    axes.set_xlabel("memory cap of a node")
    axes.set_ylabel("makespan")
    axes.legend(frameon=False)
    return svg_text(figure)
