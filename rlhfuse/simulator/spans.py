"""The simulated time line of generation and inference: who does what from when to when.

Knows nothing of how it comes about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.decisions.migration import MigrationPlan


@dataclass(frozen=True)
class Span:
    """What one instance does from `start` to `end`, in seconds of the iteration."""

    instance: int
    kind: str  # generate, meet, migrate, swap_in, score or idle
    start: float
    end: float


@dataclass(frozen=True)
class GenInferTimeline:
    """The simulated generation and inference of one batch.

    `plan` is the migration, None where it stayed serial; `trigger_seconds` when it was agreed on;
    `spans` tile [0, total_seconds] of every instance.
    """

    spans: tuple[Span, ...]
    total_seconds: float
    generation_seconds: float  # until the last sample is finished
    migration_seconds: float  # from the trigger until every destination decodes again
    trigger_seconds: float | None
    plan: MigrationPlan | None
    migrated_bytes: float
    scored_before_generation_end: int

    def of(self, instance: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.instance == instance)


def tile(spans: Sequence[Span], instances: int, total: float) -> tuple[Span, ...]:
    """Spans by instance and time, gaps filled with idle, empty ones left out."""
    by_instance: list[list[Span]] = [[] for _ in range(instances)]
    for span in spans:
        if span.end > span.start:
            by_instance[span.instance].append(span)
    tiled = []
    for instance, own in enumerate(by_instance):
        clock = 0.0
        for span in sorted(own, key=lambda s: s.start):
            if span.start > clock:
                tiled.append(Span(instance, "idle", clock, span.start))
            tiled.append(span)
            clock = span.end
        if clock < total:
            tiled.append(Span(instance, "idle", clock, total))
    return tuple(tiled)
