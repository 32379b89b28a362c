"""What one rank did in the running iteration, and for how long."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.monitor.trace import Span


@dataclass
class Phases:
    """Wall seconds of each part, and the spans of the trace."""

    rank: int
    iteration: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def done(self, name: str, start: float) -> None:
        """The part `name`, begun at `start` in `time.time()` seconds, is over now."""
        end = time.time()
        self.seconds[name] = end - start
        self.spans.append(Span(name, name, self.rank, start, max(start, end), args={"iteration": self.iteration}))

    def note(self, name: str, kind: str, start: float, end: float) -> None:
        self.spans.append(Span(name, kind, self.rank, start, max(start, end)))

    def note_generation(self, report: GenInferReport) -> None:
        for span in report.spans:
            self.note(span.kind, span.kind, span.start_seconds, span.end_seconds)

    def note_training(self, results: Sequence[MinibatchResult], start: float) -> None:
        """Every action of the mini-batches, which began at `start` and are over now."""
        self.seconds["train"] = time.time() - start
        wall = time.time() - time.perf_counter()  # actions are timed by the other clock
        for result in results:
            for span in result.report.spans:
                kind = f"{result.roles[span.action.pipeline]} {span.action.kind}"
                self.note(str(span.action), kind, wall + span.start_seconds, wall + span.end_seconds)
