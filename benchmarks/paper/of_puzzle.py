"""PUZZLE's time-sharing of two models, by the schedules that this project builds by the paper's rule."""

from __future__ import annotations

from paper.page import Content, Results, value_row

from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan
from rlhfuse.schedule.rules.time_sharing import time_sharing


def time_shared(_: Results) -> Content:
    """Equation (1) and Figure 5."""
    rows = []
    for nodes, microbatches in ((4, 4), (16, 14), (16, 16)):
        shared = two_models(nodes, microbatches)
        ours = float(serial_makespan(shared)) / float(evaluate(time_sharing(shared)).makespan)
        printed = (microbatches + nodes - 1) * 4 / (microbatches * 4 + (nodes - 1) * 2)
        what = f"speed-up of two equal models, {nodes} stages, {microbatches} micro-batches"
        rows.append(value_row(what, "PUZZLE, equation (1)", printed, ours, ".3f"))
    for name, rule, slot in (("time-shared", time_sharing, 9), ("serial", serial_1f1b, 15)):
        schedule = rule(two_models(4, 4))
        first = schedule.orders[0].index(Action("second", 0, Kind.F, 0))
        start = float(evaluate(schedule).starts[0][first])
        what = f"first forward of the second model on device 1, {name}: slot"
        rows.append(value_row(what, "PUZZLE, Figure 5", slot, start + 1, "g"))
    return Content(rows)


def two_models(nodes: int, microbatches: int) -> FusionProblem:
    times = (1,) * nodes, (1,) * nodes, (1,) * nodes
    names = ("first", "second")
    return FusionProblem(nodes, tuple(Pipeline(n, n, tuple(range(nodes)), microbatches, *times) for n in names))


SECTIONS = {"puzzle-1": time_shared}
