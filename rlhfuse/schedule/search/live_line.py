"""One line that says where a search stands: rewritten in place on a terminal, else printed when it improves.

Knows nothing of search but its report.
"""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from rlhfuse.schedule.search.search import SearchReport

TERMINAL_SECONDS = 0.5  # between two looks of the line on a terminal
LOG_SECONDS = 3.0  # between two lines elsewhere, after an improvement
LOG_IDLE_SECONDS = 60.0  # and without one


class LiveLine:
    """Shows reports on `stream`; `time_limit` is shown beside the seconds."""

    def __init__(self, stream: TextIO, time_limit: float | None = None) -> None:
        self.stream, self.time_limit = stream, time_limit
        self.shown = float("-inf")
        self.said: tuple | None = None
        self.open = False  # a line stands on the terminal without its end
        self.moving = False

    def show(self, report: SearchReport) -> None:
        """Show `report` if it is time."""
        if self.said is None:
            self._say(f"first schedule in {report.first_seconds:.2f} s")
        if report.moves and not self.moving:
            self.moving = True
            self._say(f"kernels ready in {report.kernel_seconds:.2f} s")
        now, news = time.monotonic(), (report.makespan, report.peak_memory)
        if self.stream.isatty():
            if now - self.shown < TERMINAL_SECONDS:
                return
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r\033[K{describe(report, self.time_limit)[:width]}")
            self.open = True
        else:
            if now - self.shown < (LOG_IDLE_SECONDS if news == self.said else LOG_SECONDS):
                return
            self.stream.write(f"{describe(report, self.time_limit)}\n")
        self.stream.flush()
        self.shown, self.said = now, news

    def _say(self, line: str) -> None:
        self.end()
        self.stream.write(f"{line}\n")

    def end(self) -> None:
        """Leave the line standing."""
        if self.open:
            self.stream.write("\n")
            self.open = False


def describe(report: SearchReport, time_limit: float | None = None) -> str:
    """Makespan and memory, each with its bound and gap; seconds, and the speed of a rank."""
    moving = report.moving_seconds
    speed = f", {report.moves / moving / report.ranks:,.0f} moves/s per rank" if moving > 0 else ""
    limit = "" if time_limit is None else f"/{time_limit:g}"
    return (
        f"makespan {report.makespan:g}{' (optimal)' if report.optimal else ''}, bound {report.lower_bound:g}, "
        f"gap {_gap(report.makespan, report.lower_bound)}, memory {report.peak_memory:g}, "
        f"bound {report.memory_lower_bound:g}, gap {_gap(report.peak_memory, report.memory_lower_bound)}, "
        f"{report.seconds:.1f}{limit} s{speed}"
    )


def _gap(value: float, bound: float) -> str:
    """How far above its bound, in percent of it."""
    return f"{value / bound - 1:.2%}" if bound > 0 else "none" if value == bound else "unknown"
