"""Planned and measured peak memory of a run's phases.

planned     plan.json: all samples as long as they can become, what a rank must have
expected    the same with the activations of the largest micro-batch that the iteration had
measured    metrics.jsonl, perf/peak_memory_gb/*, on the fullest rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhfuse.monitor.phase_times import after_warm_up

DEVICE_PARTS = ("weights", "optimizer", "gradients", "activations", "kv", "buckets")
PROCESS = "base"  # the row of a process without models, as the metric is called
GB, GIB = 1e9, 2**30  # of metrics, of what people read


@dataclass(frozen=True)
class MemoryRow:
    """One phase, in bytes."""

    phase: str
    planned: float
    expected: float
    measured: float

    @property
    def error(self) -> float:
        """Error of what was expected, relative to what was measured."""
        return self.expected / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class MemoryTable:
    """The process first, then the phases in the plan's order."""

    rows: tuple[MemoryRow, ...]

    @staticmethod
    def of(plan: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]) -> MemoryTable | None:
        """From plan.json and metrics lines; None where either says nothing of memory."""
        kept = [row for row in after_warm_up(metrics) if f"perf/peak_memory_gb/{PROCESS}" in row]
        memory = plan.get("memory") if plan else None
        if not memory or not kept:
            return None
        process = _process(memory)
        rows = [MemoryRow(PROCESS, process, process, max(map(_peak_of(PROCESS), kept)))] if process else []
        for phase in memory["phases"]:
            if f"perf/peak_memory_gb/{phase['phase']}" not in kept[0]:
                continue  # the start is in no iteration
            peak = _peak_of(phase["phase"])
            fullest = max(kept, key=peak)
            share = 1.0
            if phase["phase"] == "training":  # activations are in proportion to the tokens of a micro-batch
                share = fullest["perf/microbatch_tokens"] / memory["microbatch_tokens"]
            planned, expected = (_needed(memory, phase, part) for part in (1.0, share))
            rows.append(MemoryRow(phase["phase"], planned, expected, peak(fullest)))
        return MemoryTable(tuple(rows))

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{'peak memory of a rank':22} {'at most':>9} {'expected':>9} {'measured':>9} {'off by':>7}"]
        for row in self.rows:
            name = "the process itself" if row.phase == PROCESS else row.phase
            lines.append(
                f"{name:22} {row.planned / GIB:5.3f} GiB {row.expected / GIB:5.3f} GiB {row.measured / GIB:5.3f} GiB "
                f"{row.error:+7.1%}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Bytes."""
        return {"phases": [{**asdict(row), "error": row.error} for row in self.rows]}


def _peak_of(phase: str):
    """Measured bytes of the phase in one line of metrics."""
    return lambda row: row[f"perf/peak_memory_gb/{phase}"] * GB


def _needed(memory: Mapping[str, Any], phase: Mapping[str, Any], activations: float) -> float:
    """Bytes of what was measured, with this share of the planned activations."""
    held = sum(phase[part] for part in DEVICE_PARTS) - (1 - activations) * phase["activations"]
    return held + _process(memory) + (0 if memory["own_memory"] else phase["host"])


def _process(memory: Mapping[str, Any]) -> float:
    """Bytes of a process without models; on a GPU torch's allocator, whose peaks were measured, knows nothing of it."""
    return 0 if memory["own_memory"] else memory["process_bytes"]
