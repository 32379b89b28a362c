"""From runs to figures: speedup and its limit, predicted beside measured over R_t, agreement and migration.

`Point` is one R_t: what the simulator says of it and the runs that were measured. Knows nothing of how runs were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inter_stage_cases import INSTANCES
from inter_stage_runs import Run

from rlhfuse.monitor.trace import Span
from rlhfuse.simulator.iteration import GenInferTimeline

GAP_SECONDS = 0.2  # between two runs in the trace
SPEEDUP_GOAL = 1.2
AGREEMENT_GOAL = 0.02  # of generation
MIGRATION_GOAL = 0.03  # of the stage
ERROR_GOAL = 0.10  # mean, predicted against measured
CHOICE_GOAL = 0.05  # chosen R_t over the best measured


@dataclass(frozen=True)
class Point:
    """One R_t; 0 is serial."""

    threshold: int
    predicted: GenInferTimeline
    ideal: GenInferTimeline  # migration and loading free
    runs: tuple[Run, ...]  # by round

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def error(self) -> float:
        return self.predicted.total_seconds / self.seconds - 1

    @property
    def middle(self) -> Run:
        """The run of the median."""
        return sorted(self.runs, key=lambda run: run.seconds)[len(self.runs) // 2]

    def median(self, value: Callable[[Run], float]) -> float:
        return statistics.median(value(run) for run in self.runs)

    def row(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "seconds": self.seconds,
            "least": min(run.seconds for run in self.runs),
            "most": max(run.seconds for run in self.runs),
            "predicted": self.predicted.total_seconds,
            "error": self.error,
            "generation": self.median(lambda run: run.generation_seconds),
            "generation_predicted": self.predicted.generation_seconds,
            "migration": self.median(lambda run: run.migration_seconds),
            "migration_predicted": self.predicted.migration_seconds,
            "early": self.median(lambda run: run.ranks[0].early),
            "early_predicted": self.predicted.scored_before_generation_end,
            "cpu_share": min(run.cpu_share for run in self.runs),
            "raw": [
                {"seconds": run.seconds, "generation": run.generation_seconds, "cpu_share": run.cpu_share}
                for run in self.runs
            ],
        }


def work_seconds(timeline: GenInferTimeline) -> float:
    """Scoring of all instances together."""
    return sum(span.end - span.start for span in timeline.spans if span.kind == "score")


def ideal_seconds(point: Point, work: float) -> float:
    """With free migration and loading, and scoring that is cut as finely as one likes and never waits for a sample.

    The destinations score from the end of generation G on, the freed from the trigger t: n instances end together after
    max(G, (m G + (n - m) t + work) / n).
    """
    generation = point.ideal.generation_seconds
    if not point.ideal.plans:
        return generation + work / INSTANCES
    count, trigger = len(point.ideal.plans[-1].destinations), point.ideal.trigger_seconds[-1]
    return max(generation, (count * generation + (INSTANCES - count) * trigger + work) / INSTANCES)


def figures(
    points: Sequence[Point], chosen: int, final: Mapping[int, Sequence[Run]], same_bits: bool
) -> dict[str, Any]:
    """Everything measured with one pair of models, for the JSON object. The first point is serial.

    `final` has the later runs, by round, of the R_t chosen and of the sweep's fastest one; it is empty where these are
    the same.
    """
    serial, fused = points[0], next(point for point in points if point.threshold == chosen)
    best = min(points, key=lambda point: point.seconds)
    ratios = [before.seconds / after.seconds for before, after in zip(serial.runs, fused.runs)]
    generation = serial.median(lambda run: run.generation_seconds)
    inference = serial.median(lambda run: run.inference_seconds)
    work = work_seconds(serial.ideal)
    ideal = min(ideal_seconds(point, work) for point in points)
    middle = fused.middle
    return {
        "chosen": chosen,
        "speedup": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "speedup_predicted": serial.predicted.total_seconds / fused.predicted.total_seconds,
        "speedup_best_measured": serial.seconds / best.seconds,
        "inference_over_generation": inference / generation,
        "bound": 1 + inference / generation,
        "ideal": ideal_seconds(serial, work) / ideal,
        "generation_seconds": generation,
        "inference_seconds": inference,
        "mean_error": statistics.mean(abs(point.error) for point in points),
        "worst_error": max((point.error for point in points), key=abs),
        "best_threshold": best.threshold,
        "chosen_over_best_of_sweep": fused.seconds / best.seconds - 1,
        "chosen_over_best": chosen_over_best(final, chosen, best.threshold),
        "final": {threshold: [run.seconds for run in runs] for threshold, runs in final.items()},
        "agreement_share": fused.median(lambda run: run.agreement_share),
        "agreement_share_serial": serial.median(lambda run: run.agreement_share),
        "migration_share": fused.median(lambda run: run.migration_seconds / run.seconds),
        "pause_seconds": fused.median(lambda run: run.ranks[0].pause_seconds),
        "migrated_samples": middle.ranks[0].migrated_samples,
        "migrated_bytes": middle.ranks[0].migrated_bytes,
        "needed_bytes": middle.ranks[0].needed_bytes,
        "early": middle.ranks[0].early,
        "same_bits": same_bits,
        "cpu_share": min(run.cpu_share for point in points for run in point.runs),
        "points": [point.row() for point in points],
    }


def chosen_over_best(final: Mapping[int, Sequence[Run]], chosen: int, best: int) -> float:
    """Median over the rounds; 0 where the choice was the fastest of the sweep."""
    if chosen == best:
        return 0.0
    return statistics.median(ours.seconds / theirs.seconds for ours, theirs in zip(final[chosen], final[best])) - 1


def goals(case: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals that this run measured, and whether they are reached."""
    rows = (
        ("Gen+Inf speedup", SPEEDUP_GOAL, found["speedup"]["median"], True),
        ("agreement, share of generation", AGREEMENT_GOAL, found["agreement_share"], False),
        ("migration, share of the stage", MIGRATION_GOAL, found["migration_share"], False),
        ("mean error of the prediction", ERROR_GOAL, found["mean_error"], False),
        ("chosen R_t over the best measured", CHOICE_GOAL, found["chosen_over_best"], False),
    )
    return [
        {
            "case": case,
            "figure": figure,
            "goal": goal,
            "measured": measured,
            "reached": measured >= goal if at_least else measured <= goal,
        }
        for figure, goal, measured, at_least in rows
    ]


def trace_spans(points: Sequence[Point], chosen: int, begin: float, case: str) -> list[Span]:
    """The median runs, serial and at the chosen R_t, predicted and measured, one after the other."""
    spans: list[Span] = []
    for point in (points[0], next(point for point in points if point.threshold == chosen)):
        facts, run = {"case": case, "R_t": point.threshold}, point.middle
        for one in point.predicted.spans:
            if one.kind != "idle":
                name = "load" if one.kind == "swap_in" else one.kind
                spans.append(Span(name, name, one.instance, begin + one.start, begin + one.end, "predicted", facts))
        start = min(rank.begin for rank in run.ranks)
        for number, rank in enumerate(run.ranks):
            for kind, first, last in rank.spans:
                spans.append(Span(kind, kind, number, begin + first - start, begin + last - start, "measured", facts))
        begin = max(span.end_seconds for span in spans) + GAP_SECONDS
        if chosen == 0:
            break
    return spans
