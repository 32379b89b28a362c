"""Makes the work of a rank last as long as that of larger models would, and tells how far the run is evidence.

Prices lie inside of what the run observes and records, so that R_t, schedules and reports follow from them. Values are
the run's own. What takes longer than its price is late, and counted; what nothing prices (Python, messages, waits for
others) takes its own time, of which a stretch shows a part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhfuse.base.clock import Clock

MOST_CPU, MOST_LATE = 0.4, 0.01  # of the machine's cores, and of the pieces of work: with more a run is no evidence


class PaceStats(NamedTuple):
    """One rank's pieces of work in an iteration, how many were late, and by how many seconds at most, which counts
    sleeps that ended late too; CPU seconds of the rank, and of all programs on its machine."""

    pieces: int
    late: int
    lateness: float
    cpu_seconds: float
    machine_seconds: float


def cpu_seconds() -> float:
    """CPU time that this machine has spent on all programs. Raises OSError where /proc does not say."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class PacedClock(Clock):
    """The clock of one rank whose work lasts as long as it is priced."""

    def __init__(
        self, rank: int, prices: Mapping[str, Callable[..., float]], stretch: float = 1.0, name: str = ""
    ) -> None:
        """`prices`: by the kind of work, stretched already; `name`: of all that, in words."""
        super().__init__(rank)
        self._prices, self._stretch, self._name = prices, stretch, name
        self._counts = {kind: [0, 0, 0.0] for kind in self._prices}  # a kind is of one thread
        self._began = time.process_time(), cpu_seconds()

    def hold(self, start: float, kind: str, *counts: Any) -> None:
        seconds = self._prices[kind](*counts)
        if not seconds:
            return
        end, count = start + seconds, self._counts[kind]
        left = end - self.now()
        if left > 0:
            self.sleep(left)
        count[0] += 1
        count[1] += left < 0
        count[2] = max(count[2], self.now() - end)

    def take_pace(self) -> PaceStats:
        """What happened since the last time."""
        counts, before = list(self._counts.values()), self._began
        self._counts = {kind: [0, 0, 0.0] for kind in self._prices}
        self._began = time.process_time(), cpu_seconds()
        pieces, late, lateness = sum(c[0] for c in counts), sum(c[1] for c in counts), max(c[2] for c in counts)
        return PaceStats(pieces, late, lateness, *(now - then for now, then in zip(self._began, before)))

    def pace_metrics(self, ranks: Sequence[PaceStats], seconds: float, cores: float) -> dict[str, Any]:
        """Metrics of an iteration that took so long on machines of so many cores, of which `paced` says in words what
        it is and is not.

        `python_share` is of the busiest rank: what its CPU time would be of an iteration without a stretch, at most.
        """
        pieces, core_seconds = sum(rank.pieces for rank in ranks), seconds * cores
        busiest = max(rank.cpu_seconds for rank in ranks)
        late = sum(rank.late for rank in ranks) / max(pieces, 1)
        machine = max(rank.machine_seconds for rank in ranks) / core_seconds
        is_evidence = machine <= MOST_CPU and late <= MOST_LATE
        return {
            "paced": f"{self._name}: {'evidence' if is_evidence else 'no evidence'}",
            "paced/pieces": pieces,
            "paced/late_share": late,
            "paced/largest_lateness_seconds": max(rank.lateness for rank in ranks),
            "paced/cpu_share": sum(rank.cpu_seconds for rank in ranks) / core_seconds,
            "paced/machine_cpu_share": machine,
            "paced/python_seconds": busiest,
            "paced/python_share": min(1.0, busiest * self._stretch / seconds),
        }
