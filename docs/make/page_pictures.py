"""Pictures of the results pages, drawn from results files. One that says it is of the same values stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any

from page_charts import bars_in_ranges, lines, scatter

Result = Mapping[str, Any]
Drawing = tuple[Callable[..., str], tuple[Any, ...]]  # a chart and what it takes


def picture(text: str, drawing: Drawing) -> str:
    """The <svg> of a drawing, on white paper; `text` itself if it is of the same."""
    chart, values = drawing
    mark = f"<!-- of {sha256(repr((chart.__name__, values)).encode()).hexdigest()[:16]} -->"
    if mark in text:
        return text
    svg = chart(*values).replace("<svg ", '<svg style="background: #fff" ', 1)
    return f"{svg.rstrip()}\n{mark}\n"


def inter_stage(result: Result) -> Drawing:
    """Seconds over R_t, a panel for each actor."""
    panels = {}
    for name, title in (("plain", "plain"), ("guessed", "with guesses")):
        rows = [[float(cell.split()[0]) for cell in row[:3]] for row in result["tables"][f"{name}.sweep"]["rows"]]
        sides = (("measured", 1), ("predicted", 2))
        panels[title] = {side: [(row[0], row[at]) for row in rows] for side, at in sides}
    return lines, (panels, "R_t, samples of 64", "seconds of generation with inference", {})


def intra_stage(result: Result) -> Drawing:
    """Speedup over micro-batches, a panel for each pair of models."""
    figures, panels = result["figures"], {}
    for name, title in (("1to1", "actor as deep as the critic"), ("2_5to1", "actor 2.5 times as deep")):
        keys = {"measured": "speedup", "promised by the schedule": "speedup.predicted"}
        panels[title] = {
            side: [(m, figures[f"{name}_m{m}.{key}"]["value"]) for m in (2, 4, 8)] for side, key in keys.items()
        }
    return lines, (panels, "micro-batches of a mini-batch", "times as fast as serial", {})


def paced_generation(result: Result) -> Drawing:
    """As the paper's Figure 9, a panel for each kind of lengths."""
    panels = {}
    for name, points in result["facts"].items():
        sides = (("measured", 1), ("predicted", 2))
        panels[name.removeprefix("curve_")] = {side: sorted((row[0], row[at]) for row in points) for side, at in sides}
    return lines, (panels, "R_t over the batch", "seconds of generation with inference", {"20%": 0.2})


def paced_iterations(result: Result) -> Drawing:
    """As the paper's Figures 7 and 8, which give ranges: what is gained over base."""
    wanted = {"Gen+Inf": ("inter.gen_infer", "gen_infer"), "Train": ("intra.training", "training")}
    wanted["end to end"] = ("both.iteration", "iteration")
    panels = {title: {} for title in wanted}
    for name in dict.fromkeys(key.rpartition(".")[0] for key in result["facts"]["runs"]):
        pair, variant = name.split(".")
        label = pair.replace("_", "/") + ("\npadded" if variant == "p" else "\npacked")
        for title, (key, _) in wanted.items():
            panels[title][label] = result["figures"][f"{name}.{key}"]["value"]
    ranges = {title: tuple(result["facts"]["ranges"][key]) for title, (_, key) in wanted.items()}
    return bars_in_ranges, (panels, ranges, "times as fast as base")


def planner_regret(result: Result) -> Drawing:
    """Every table of layouts, predicted over measured."""

    def points(setting: str, at: int) -> list[tuple[float, float]]:
        return [(sum(row[1].values()), sum(row[at].values())) for row in result["facts"][f"{setting}.tables"]]

    groups = {
        f"{setting}, {costs}": points(setting, at)
        for setting in ("balanced", "tail")
        for costs, at in (("profile", 2), ("nothing measured", 3))
    }
    return scatter, (groups, "measured seconds of an iteration", "predicted seconds")


def schedule_curve(result: Result) -> Drawing:
    """Least memory found over the time that a schedule may take, whole and split, of Table 3's widest settings."""
    panels: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    rows = [row for row in result["tables"]["curve"]["rows"] if row[0].split()[0] == "16/16"]
    for setting, kinds in groupby(rows, lambda row: row[0].rpartition(" ")[0]):
        panels[setting] = {}
        for name, bound, _, *cells, serial in kinds:
            found = [tuple(map(float, cell.split(":"))) for cell in cells if cell]
            points = [(makespan / float(bound), memory / float(serial)) for makespan, memory in found]
            panels[setting][name.rpartition(" ")[2]] = sorted(points)
    return lines, (panels, "time over its bound", "peak memory over serial 1F1B's", {})


def speculation(result: Result) -> Drawing:
    """Gain of guesses over iterations, for each kind of lengths."""
    figures, panels = result["figures"], {}
    for part, title in (("tail", "the tail"), ("whole", "all of generation")):
        panels[title] = {
            f"{run}, {lengths}": [
                (iteration, figures[f"{run}.it{iteration}.4.5m.{lengths}.{part}"]["value"]) for iteration in (0, 5, 15)
            ]
            for run, lengths in (("grpo", "arxiv"), ("grpo", "azure"), ("grpo", "sharegpt"), ("quickstart", "natural"))
        }
    return lines, (panels, "iteration of the policy", "times as fast with guesses", {})


DRAWN = inter_stage, intra_stage, paced_generation, paced_iterations, planner_regret, schedule_curve, speculation
PICTURES: dict[str, Callable[[Result], Drawing]] = {one.__name__: one for one in DRAWN}
