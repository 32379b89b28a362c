"""How much of a phase the ranks idled in: they waited for others, for the last long responses, or in bubbles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfuse.base.clock import Span
from rlhfuse.monitor.phase_times import PHASES

WORK = ("reshard", "generate", "migrate", "load", "score")  # kinds of spans, beside those of training


def idle_shares(traced: Mapping[int, Sequence[Span]], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the ranks' time in a phase in which they did no work of their own, by name of `PHASES`.

    `traced`: spans by iteration.
    """
    busy, whole = defaultdict(float), defaultdict(float)
    for row in (row for row in rows if any(span.kind == "adv" for span in traced.get(row["iteration"], ()))):
        spans = traced[row["iteration"]]
        moves, books = ([span for span in spans if span.kind == kind] for kind in ("reshard", "adv"))
        begin = min(span.end_seconds for span in moves)
        decoded, scored = begin + row["timing_s/gen"], max(span.start_seconds for span in books)
        trained = min(span.end_seconds for span in books), max(span.end_seconds for span in spans)
        windows = {"gen": (begin, decoded), "infer": (decoded, scored), "train": trained}
        work = [span for span in spans if span.kind in WORK or " " in span.kind]
        for phase, (first, last) in windows.items():
            parts = (min(span.end_seconds, last) - max(span.start_seconds, first) for span in work)
            busy[phase] += sum(max(part, 0.0) for part in parts)
            whole[phase] += len({span.rank for span in spans}) * max(last - first, 0.0)
    return {PHASES[f"timing_s/{phase}"]: max(0.0, 1 - busy[phase] / whole[phase]) for phase in busy if whole[phase]}
