"""What every rank did and when, as a Chrome trace.

`Span`s are saved in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens: one process for what was measured,
one for what was predicted, a thread per rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhfuse.base.clock import GROUPS, Span
from rlhfuse.base.files import write_text

MICROSECONDS = 1e6  # the unit of Chrome traces


def save_trace(spans: Sequence[Span], path: str | Path) -> None:
    """Write a Chrome trace beside `path` and rename it into place. Raises InputError where that fails."""
    tracks = sorted({(GROUPS.index(span.group), span.rank) for span in spans})
    names = [("process_name", pid, 0, GROUPS[pid]) for pid in sorted({pid for pid, _ in tracks})]
    names += [("thread_name", pid, rank, f"rank {rank}") for pid, rank in tracks]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}} for kind, pid, tid, name in names
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": GROUPS.index(span.group),
            "tid": span.rank,
            "ts": span.start_seconds * MICROSECONDS,
            "dur": (span.end_seconds - span.start_seconds) * MICROSECONDS,
            "args": span.args,
        }
        for span in sorted(spans, key=lambda span: (span.group, span.rank, span.start_seconds))
    ]
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
