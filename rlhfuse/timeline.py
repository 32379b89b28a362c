"""Predicted timelines of an iteration, to stand beside the measured one in trace.json.

Training is predicted from the mean time that each stage's forward and backward took in this iteration, laid out
in the schedule's order as if every rank had a core or GPU of its own; generation and inference by the simulator.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Iterable, Sequence

from rlhfuse.fusion.training_step import MinibatchResult
from rlhfuse.fusion.placement import Placement
from rlhfuse.monitor.trace import Span
from rlhfuse.schedule.evaluate import evaluate
from rlhfuse.schedule.problem import StageCosts, fused_problem
from rlhfuse.schedule.ranks import FusedRanks
from rlhfuse.schedule.schedule import Schedule
from rlhfuse.simulator.iteration import GenInferTimeline
from rlhfuse.simulator.layouts import Task


@dataclass
class StageTimes:
    """Seconds and counts of every (role, stage, kind)."""

    sums: dict[tuple[str, int, str], tuple[float, int]] = field(default_factory=dict)

    @staticmethod
    def of(results: Iterable[MinibatchResult]) -> "StageTimes":
        sums: dict[tuple[str, int, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for result in results:
            for span in result.spans:
                key = (span.action.pipeline.split(".")[0], span.action.stage, str(span.action.kind))
                seconds, count = sums[key]
                sums[key] = (seconds + span.end_seconds - span.start_seconds, count + 1)
        return StageTimes(dict(sums))

    @staticmethod
    def merge(parts: Sequence["StageTimes"]) -> "StageTimes":
        merged: dict[tuple[str, int, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for part in parts:
            for key, (seconds, count) in part.sums.items():
                merged[key] = (merged[key][0] + seconds, merged[key][1] + count)
        return StageTimes(dict(merged))

    def to_list(self) -> list[list]:
        return [[*key, *value] for key, value in sorted(self.sums.items())]

    @staticmethod
    def from_list(rows: list[list]) -> "StageTimes":
        return StageTimes({(role, stage, kind): (seconds, count) for role, stage, kind, seconds, count in rows})

    def priced(self, schedule: Schedule, tasks: Sequence[Task], actor_microbatches: int) -> Schedule:
        """The schedule's order with these times, in seconds."""
        layouts = {task.role: task.layout for task in tasks if task.training}

        def costs(role: str) -> StageCosts:
            def mean(stage: int, kind: str) -> float:
                seconds, count = self.sums[role, stage, kind]
                return seconds / count

            stages = range(layouts[role].stages)
            return StageCosts(
                tuple(mean(s, "F") for s in stages), tuple(mean(s, "B") for s in stages), tuple(1 for _ in stages)
            )

        problem = fused_problem(layouts, actor_microbatches, {role: costs(role) for role in layouts})
        return Schedule(problem, schedule.orders)

    def makespan(self, schedule: Schedule, tasks: Sequence[Task], actor_microbatches: int) -> float:
        """Seconds of one mini-batch by these times."""
        return float(evaluate(self.priced(schedule, tasks, actor_microbatches)).makespan)


def training_spans(priced: Schedule, ranks: FusedRanks, begin: float, minibatches: int) -> list[Span]:
    """Predicted spans of `minibatches` runs of the schedule, one after the other from `begin` on."""
    timeline = evaluate(priced)
    spans = []
    for number in range(minibatches):
        start = begin + number * float(timeline.makespan)
        for replica in range(len(ranks.replicas)):
            for node, order in enumerate(priced.orders):
                for action, first, last in zip(order, timeline.starts[node], timeline.ends[node]):
                    rank = ranks.replicas[replica][action.pipeline][action.stage][0][0]
                    kind = f"{action.pipeline.split('.')[0]} {action.kind}"
                    spans.append(Span(str(action), kind, rank, start + first, start + last, "predicted"))
    return spans


def gen_infer_spans(timeline: GenInferTimeline, placement: Placement, begin: float) -> list[Span]:
    """Predicted spans of generation and inference on the first rank of each instance."""
    measured_name = {"swap_in": "load"}  # one word in the picture for the same thing
    spans = []
    for span in timeline.spans:
        if span.kind != "idle":
            kind = measured_name.get(span.kind, span.kind)
            rank = placement.instances[span.instance][0]
            spans.append(Span(kind, kind, rank, begin + span.start, begin + span.end, "predicted"))
    return spans
