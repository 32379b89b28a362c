"""What a running search shows and writes: a live line, and the output file with the best schedule so far."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import JsonModel, JsonNumber, parse_json
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.search import SearchReport

TERMINAL_SECONDS = 0.5  # between two looks of the line on a terminal
LOG_SECONDS = 3.0  # between two lines elsewhere, after an improvement
LOG_IDLE_SECONDS = 60.0  # and without one
LONGEST_WAIT_SECONDS = 0.5  # of an improvement for its write
NonNegative = Annotated[JsonNumber, Field(ge=0)]


class LiveLine:
    """Shows reports on `stream`: rewritten in place on a terminal, else a line when it improves.

    `time_limit` is shown beside the seconds.
    """

    def __init__(self, stream: TextIO, time_limit: float | None = None) -> None:
        self.stream, self.time_limit = stream, time_limit
        self.shown_at = -math.inf
        self.shown: tuple | None = None
        self.open = False  # a line stands on the terminal without its end
        self.moving = False

    def show(self, report: SearchReport) -> None:
        """Show `report` if it is time."""
        if self.shown is None:
            self._print(f"first schedule in {report.first_seconds:.2f} s")
        if report.moves and not self.moving:
            self.moving = True
            self._print(f"kernels ready in {report.kernel_seconds:.2f} s")
        now, news = time.monotonic(), (report.makespan, report.peak_memory)
        if self.stream.isatty():
            if now - self.shown_at < TERMINAL_SECONDS:
                return
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r\033[K{describe(report, self.time_limit)[:width]}")
            self.open = True
        else:
            if now - self.shown_at < (LOG_IDLE_SECONDS if news == self.shown else LOG_SECONDS):
                return
            self.stream.write(f"{describe(report, self.time_limit)}\n")
        self.stream.flush()
        self.shown_at, self.shown = now, news

    def _print(self, line: str) -> None:
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
        f"gap {percent_above(report.makespan, report.lower_bound)}, memory {report.peak_memory:g}, "
        f"bound {report.memory_lower_bound:g}, gap {percent_above(report.peak_memory, report.memory_lower_bound)}, "
        f"{report.seconds:.1f}{limit} s{speed}"
    )


def percent_above(value: float, bound: float) -> str:
    """How far a value is above its bound, in percent of it."""
    return f"{value / bound - 1:.2%}" if bound > 0 else "none" if value == bound else "unknown"


class EarlierRuns(JsonModel, extra="ignore"):
    """What earlier runs on the same file have used: the new run's figures are added to it."""

    seconds: NonNegative = 0
    moves: NonNegative = 0
    accepted: NonNegative = 0
    runs: NonNegative = 0
    first_bound_seconds: NonNegative | None = None

    @staticmethod
    def read(raw: dict[str, Any], where: str) -> EarlierRuns:
        """From a schedule file's `search`; what is missing counts as nothing. Raises InputError on a non-number."""
        return parse_json(EarlierRuns, raw.get("search") or {}, f"{where}: search")

    def facts(self, report: SearchReport) -> dict[str, Any]:
        """The `search` of a schedule file: this run's settings, and the figures of all runs together."""
        reached = self.first_bound_seconds
        if reached is None and report.first_bound_seconds is not None:
            reached = self.seconds + report.first_bound_seconds
        return {
            "seed": report.settings.seed,
            "ranks": report.ranks,
            "objective": report.settings.objective,
            "moves": self.moves + report.moves,
            "accepted": self.accepted + report.accepted,
            "seconds": round(self.seconds + report.seconds, 3),
            "first_bound_seconds": reached if reached is None else round(reached, 3),
            "runs": self.runs + 1,
        }


class ResultFile:
    """Writes the best schedule to `path`; owned by rank 0.

    The next write waits ten times as long as the last one took, but never so long that an improvement is a second old.
    A failing write is reported once and tried again with every later one; only the last one must succeed.
    """

    def __init__(self, path: str | Path, earlier: EarlierRuns | None = None) -> None:
        self.path, self.earlier = Path(path), earlier or EarlierRuns()
        self.waiting: tuple[Schedule, SearchReport] | None = None
        self.next_write = -math.inf
        self.failed = False

    @staticmethod
    def check_writable(path: Path) -> None:
        """Raise InputError unless a file can be made beside `path`."""
        try:
            descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; give a path in a writable folder") from None
        os.close(descriptor)
        os.unlink(beside)

    def improved(self, schedule: Schedule, report: SearchReport) -> None:
        """Take a new best schedule, and write it if it is time."""
        self.waiting = (schedule, report)
        self.write()

    def write(self, at_once: bool = False, last: bool = False) -> None:
        """Write what waits, if it is time or `at_once`. Raises InputError where the `last` write fails."""
        begun = time.monotonic()
        if self.waiting is None or not (at_once or begun >= self.next_write):
            return
        schedule, report = self.waiting
        try:
            save_schedule(self.path, schedule, self.earlier.facts(report))
            self.waiting = None
        except InputError as error:
            if last:
                raise
            if not self.failed:
                print(f"{error}; trying again with the next improvement", file=sys.stderr, flush=True)
            self.failed = True
        now = time.monotonic()
        self.next_write = now + min(10 * (now - begun), LONGEST_WAIT_SECONDS)
