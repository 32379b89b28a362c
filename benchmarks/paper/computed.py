"""Figures of RLHFuse and PUZZLE: by formula where they follow from the settings, else as they were predicted once."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

from page_charts import lines, stacked_pairs
from paper.page import Content, Picture, Results, claim_row, measured, value_row
from paper.settings import MAX_LENGTHS
from paper.table3 import PRINTED, SETTINGS, one_f_one_b_plus_makespan
from schedule_drawing import draw_schedule

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b, serial_makespan, serial_peak_memory
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b, interleaved_problem
from rlhfuse.schedule.rules.time_sharing import time_sharing
from rlhfuse.schedule.search.search import SearchSettings, search

COLUMNS = (  # of Table 3, as they are printed
    *((name, "latency") for name in ("1F1B+", "greedy", "ours", "lower bound")),
    *((name, "memory") for name in ("greedy", "ours")),
)
FIGURE_10 = 6  # its setting among those of Table 3
SEARCH_SECONDS = 30.0
SIGMA = 1.0  # of the logarithm of a response's length, in those predictions


def cells_of(results: Results, variant: str, max_length: int | None = None) -> list[Any]:
    """Predictions of a variant, of one maximum length or all."""
    cells = [SimpleNamespace(**fact) for fact in results["paper_settings"]["facts"]["cells"]]
    return [cell for cell in cells if cell.variant == variant and max_length in (None, cell.max_length)]


def lengths_and_tail(results: Results) -> Content:
    """Figure 2."""
    ratio = exp(NormalDist().inv_cdf(0.999) * SIGMA)
    rows = [claim_row("p99.9 over median length", "RLHFuse, 2.2", "> 10", f"{ratio:.1f}", ratio > 10)]
    for length in MAX_LENGTHS:
        shares = [cell.tail_seconds / cell.generation_seconds for cell in cells_of(results, "P", length)]
        what = f"generation after 99% of the samples have ended, maximum length {length}"
        found = f"{min(shares):.0%}-{max(shares):.0%}"
        rows.append(claim_row(what, "RLHFuse, Figure 2 right", "> 50%", found, min(shares) > 0.5))
    return Content(rows)


def bubbles(_: Results) -> Content:
    """Figure 3: idle share of 1F1B and of interleaved 1F1B."""
    nodes, microbatches, rows = 4, 4, []
    times = (2,) * nodes, (4,) * nodes, (1,) * nodes
    whole = FusionProblem(nodes, (Pipeline("a", "a", tuple(range(nodes)), microbatches, *times),))
    cut = interleaved_problem(whole, 2)
    for name, schedule, printed in (
        ("1F1B", serial_1f1b(whole), (nodes - 1) / (nodes - 1 + microbatches)),
        ("interleaved 1F1B, 2 chunks", interleaved_1f1b(cut), (nodes - 1) / (nodes - 1 + 2 * microbatches)),
    ):
        idle = 1 - 6 * microbatches / float(evaluate(schedule).makespan)
        rows.append(value_row(f"{name}: idle share, 4 stages, 4 micro-batches", "RLHFuse, 2.2", printed, idle, ".3f"))
    return Content(rows)


def settings(results: Results) -> Content:
    """Figures 7 to 9: what was predicted, and the pictures of Figures 8 and 9."""
    pictures, panels = [], {}
    for length in MAX_LENGTHS:
        picture = stacked_pairs({cell.pair: bars(cell) for cell in cells_of(results, "P", length)}, "seconds")
        pictures.append(Picture(f"As Figure 8, maximum length {length}, variant P: left serial, right fused.", picture))
    for variant in ("P", "K"):
        panels[f"variant {variant}"] = {
            cell.pair: [(float(ratio), seconds) for ratio, seconds in cell.sweep.items()]
            for cell in cells_of(results, variant, 1024)
        }
    picture = lines(panels, "R_t over the batch", "seconds of generation with inference", {"20%": 0.2})
    pictures.append(Picture("As Figure 9, maximum length 1024.", picture))
    return replace(measured(results["paper_settings"]), pictures=pictures)


def bars(cell: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by part: serial, fused."""
    serial, fused = cell.training_seconds
    inference = cell.serial_seconds - cell.generation_seconds
    return (
        {"generation": cell.generation_seconds, "inference": inference, "training": serial},
        {"generation with inference": cell.fused_seconds, "training": fused},
    )


def table_3(results: Results) -> Content:
    """Speed-ups and memory of schedules, relative to serial 1F1B."""
    rows = []
    found = {fact["setting"]: fact for fact in results["schedule_table"]["facts"]["rows"]}
    for setting, printed in zip(SETTINGS, PRINTED):
        problem, ours = setting.problem(), found[setting.name]
        rule, serial, memory = evaluate(greedy(problem)), serial_makespan(problem), serial_peak_memory(problem)
        ticks = one_f_one_b_plus_makespan(setting), rule.makespan, ours["makespan"][0], latency_bound(problem)
        gains = [float(serial) / float(one) for one in ticks]
        peaks = [float(one) / float(memory) for one in (max(rule.node_peak_memory), ours["peak_memory"][0])]
        for column, theirs, own in zip(COLUMNS, printed, (*gains, *peaks)):
            what, source = f"{setting.models} {setting.name}: {column[0]}", f"RLHFuse, Table 3, {column[1]}"
            rows.append(value_row(what, source, theirs, own))
    return Content(rows)


def figure_10(_: Results) -> Content:
    """The schedule of 65B with 33B, found anew."""
    problem, source = SETTINGS[FIGURE_10].problem(), "RLHFuse, 7.4, Figure 10"
    schedule, report = search(problem, SearchSettings(time_limit=SEARCH_SECONDS, seed=1, objective="memory"))
    alone = FusionProblem(problem.nodes, (problem.pipelines[0],))
    pairs = {
        "makespan, ticks; printed: 1F1B of the 65B alone": (serial_makespan(alone), report.makespan),
        "peak memory, units; printed: serial 1F1B": (serial_peak_memory(problem), report.peak_memory),
    }
    rows = [value_row(what, source, float(printed), float(ours), "g") for what, (printed, ours) in pairs.items()]
    svg = draw_schedule(schedule, "svg").decode()
    picture = Picture("65B on 16 stages, two 33B of 8, 16 micro-batches.", svg[svg.index("<svg") :], paper=True)
    return Content(rows, pictures=[picture], searched=report.seconds)


def time_shared(_: Results) -> Content:
    """PUZZLE, equation (1) and Figure 5: time-sharing of two models, as this project builds it by the paper's rule."""
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


SECTIONS = {
    "rlhfuse-2": lengths_and_tail,
    "rlhfuse-3": bubbles,
    "rlhfuse-7": settings,
    "rlhfuse-table3": table_3,
    "rlhfuse-10": figure_10,
    "puzzle-1": time_shared,
}
