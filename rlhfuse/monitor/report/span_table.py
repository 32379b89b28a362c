"""Where a prediction is off: seconds of every kind of work on every rank, predicted beside measured.

A phase's error says that something is wrong; this table says what: a step's pace, loading, a meeting, waiting. It adds
up the spans of trace.json and divides by the iterations that they come from.

Knows nothing of what a kind of work means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.errors import InputError
from rlhfuse.monitor.trace import GROUPS, Span

ITERATION = "reshard"  # the kind that every rank has once in an iteration


@dataclass(frozen=True)
class SpanRow:
    """Mean seconds of an iteration."""

    rank: int
    kind: str
    predicted: float
    measured: float


def span_rows(spans: Sequence[Span]) -> tuple[SpanRow, ...]:
    """By rank, and kinds in the order in which they begin. Raises InputError where the trace holds no iteration."""
    iterations = {rank: 0 for rank in sorted({span.rank for span in spans})}
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span in sorted(spans, key=lambda span: (span.rank, span.start_seconds)):
        sums[span.rank, span.kind][GROUPS.index(span.group)] += span.end_seconds - span.start_seconds
        iterations[span.rank] += span.kind == ITERATION and span.group == "measured"
    if not iterations or not all(iterations.values()):
        raise InputError(f"the trace has no measured {ITERATION!r} on some rank; give the folder of a training run")
    return tuple(
        SpanRow(rank, kind, *(seconds / iterations[rank] for seconds in both))
        for (rank, kind), both in sorted(sums.items(), key=lambda one: one[0][0])
    )


def span_table(rows: Sequence[SpanRow]) -> str:
    """The rows as text."""
    lines = [f"{'rank':>4} {'work':10} {'measured':>9} {'predicted':>9} {'difference':>10}"]
    for row in rows:
        difference = row.predicted - row.measured
        lines.append(f"{row.rank:4d} {row.kind:10} {row.measured:7.3f} s {row.predicted:7.3f} s {difference:+8.3f} s")
    return "\n".join(lines)
