"""Predicted timelines of an iteration, to stand beside the measured one in trace.json.

Training is predicted from the time of each stage's forward and backward and of each model's optimizer step, laid out
in the order of the ranks' programs as if every rank had a core or GPU of its own; generation and inference by the
simulator. Whether these times are the iteration's own or those of the iterations before it is the caller's business
(forecast.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfuse.fusion.inter.placement import Placement
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.monitor.trace import Span
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.program.times import TimedAction, makespan, program_times
from rlhfuse.simulator.iteration import GenInferTimeline


@dataclass
class StageTimes:
    """Seconds and counts of every (role, stage, kind)."""

    sums: dict[tuple[str, int, str], tuple[float, int]] = field(default_factory=dict)

    @staticmethod
    def of(results: Iterable[MinibatchResult]) -> StageTimes:
        sums: dict[tuple[str, int, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for result in results:
            for span in result.spans:
                key = (span.action.pipeline.split(".")[0], span.action.stage, str(span.action.kind))
                seconds, count = sums[key]
                sums[key] = (seconds + span.end_seconds - span.start_seconds, count + 1)
        return StageTimes(dict(sums))

    @staticmethod
    def merge(parts: Sequence[StageTimes]) -> StageTimes:
        merged: dict[tuple[str, int, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for part in parts:
            for key, (seconds, count) in part.sums.items():
                merged[key] = (merged[key][0] + seconds, merged[key][1] + count)
        return StageTimes(dict(merged))

    def to_list(self) -> list[list]:
        return [[*key, *value] for key, value in sorted(self.sums.items())]

    @staticmethod
    def from_list(rows: list[list]) -> StageTimes:
        return StageTimes({(role, stage, kind): (seconds, count) for role, stage, kind, seconds, count in rows})

    def mean(self, action: Action) -> float:
        """Seconds of an action; of an optimizer step, which waits for all ranks, those of the last to come."""
        model, kind = action.pipeline.partition(".")[0], str(action.kind)
        if action.kind is Kind.ST:
            means = [seconds / count for key, (seconds, count) in self.sums.items() if key[::2] == (model, kind)]
            return min(means)
        seconds, count = self.sums[model, action.stage, kind]
        return seconds / count

    def step_times(self, programs: Programs, ranks: FusedRanks) -> dict[int, tuple[TimedAction, ...]]:
        """One mini-batch by these times, every rank on a core or GPU of its own."""
        return program_times(programs, ranks, self.mean)


def training_spans(times: Mapping[int, Sequence[TimedAction]], begin: float, starts: Sequence[float]) -> list[Span]:
    """Predicted spans of the iteration's mini-batches, the first from `begin` on.

    `starts` are the measured starts: the mini-batches keep their distances where the prediction leaves room, so that
    each stands above the measured one although nobody predicts what lies between them.
    """
    spans = []
    length, end = makespan(times), begin
    for measured in starts:
        start = max(end, begin + measured - starts[0])
        end = start + length
        for rank, rows in times.items():
            for action, first, last in rows:
                kind = f"{action.pipeline.partition('.')[0]} {action.kind}"
                spans.append(Span(str(action), kind, rank, start + first, start + last, "predicted"))
    return spans


def phase_spans(name: str, ranks: Iterable[int], begin: float, seconds: float) -> list[Span]:
    """Predicted spans of what all ranks do together."""
    return [Span(name, name, rank, begin, begin + seconds, "predicted") for rank in ranks]


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
