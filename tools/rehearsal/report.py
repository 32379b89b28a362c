"""What a rehearsal found, for a terminal: planned and measured memory of a rank, and what held it at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GB, MB = 1e9, 1e6
ROWS = 12  # of what held memory, and of where the host waited


@dataclass(frozen=True)
class RankReport:
    """One rank's rehearsal, as a dict of RankRehearsal, beside its plan: phase -> bytes of the device."""

    found: Mapping[str, Any]
    planned: Mapping[str, int]
    limit: float

    @property
    def peaks(self) -> dict[str, Mapping[str, Any]]:
        """The iteration that took most, of each phase, in order."""
        peaks: dict[str, Mapping[str, Any]] = {}
        for phase in self.found["phases"]:
            if phase["phase"] not in peaks or phase["peak"] > peaks[phase["phase"]]["peak"]:
                peaks[phase["phase"]] = phase
        return peaks

    @property
    def fullest(self) -> Mapping[str, Any]:
        return max(self.found["phases"], key=lambda phase: phase["peak"])

    @property
    def too_full(self) -> tuple[str, ...]:
        """Phases above the limit of a rank."""
        return tuple(name for name, phase in self.peaks.items() if phase["peak"] > self.limit)

    def text(self) -> str:
        """Planned and measured by phase, in 10^9 bytes; "off by" is the plan's, as at the end of a run."""
        lines = [f"{self._title:22} {'planned':>10} {'measured':>10} {'off by':>7}"]
        for name, phase in self.peaks.items():
            planned, over = self.planned.get(name, 0), "  over the limit" if name in self.too_full else ""
            error = f"{planned / phase['peak'] - 1:+7.2%}" if planned else f"{'':7}"
            shown = f"{planned / GB:7.3f} GB" if planned else f"{'not':>7}   "
            lines.append(f"{name:22} {shown} {phase['peak'] / GB:7.3f} GB {error}{over}")
        last = max(self.found["phases"], key=lambda phase: phase["host"])
        most = max(phase["host_peak"] for phase in self.found["phases"])
        lines.append(
            f"{'host memory':22} {self._host()} {last['host'] / GB:7.3f} GB, {last['reserved'] / GB:.3f} reserved, "
            f"{most / GB:.3f} at most"
        )
        if moved := self.found["moved"]:
            lines.append(f"{moved} samples came from other instances or went there")
        return "\n".join((*lines, *self._reads(), *self._problems()))

    @property
    def _title(self) -> str:
        return f"memory of rank {self.found['rank']}"

    def table(self) -> str:
        """What held the memory at the highest peak."""
        phase = self.fullest
        head = f"rank {self.found['rank']} at its peak, {phase['phase']} of iteration {phase['iteration']}:"
        rows = [f"  {count / GB:8.3f} GB  {where:10} {what}" for where, what, count in phase["table"][:ROWS]]
        rest = phase["peak"] - sum(count for *_, count in phase["table"][:ROWS])
        return "\n".join((head, *rows, f"  {rest / GB:8.3f} GB  in smaller parts"))

    def _host(self) -> str:
        planned = self.planned.get("host")
        return f"{planned / GB:7.3f} GB" if planned else " " * 10

    def _reads(self) -> Sequence[str]:
        lines = []
        for name, phase in self.peaks.items():
            if count := sum(phase["reads"].values()):
                most = sorted(phase["reads"].items(), key=lambda read: -read[1])[:3]
                lines.append(
                    f"{name}: the host waits {count} times for the device, most at "
                    + ", ".join(f"{where} ({times})" for where, times in most)
                )
        return lines

    def _problems(self) -> Sequence[str]:
        return [f"{times} times: {what}" for what, times in self.found["problems"].items()]
