"""The output file of a running search: always a whole schedule, the best one of half a second ago or newer.

Finds that follow each other quickly share one write: the next write waits ten times as long as the last
one took, though never so long that a find is a second old. A write that fails while the search runs is
said once and tried again with every later one; only the last one must succeed.

Knows nothing of search. The file itself: io.py.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfuse.errors import InputError
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.search import SearchReport

LONGEST_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Spent:
    """What earlier runs on the same file have used: the new run's figures are added to it."""

    seconds: float = 0.0
    moves: int = 0
    accepted: int = 0
    runs: int = 0
    first_bound_seconds: float | None = None

    @staticmethod
    def read(raw: dict[str, Any], where: str) -> Spent:
        """From a schedule file's `search`; what is missing counts as nothing. Raises InputError on a non-number."""
        search = raw.get("search") or {}
        for key in ("seconds", "moves", "accepted", "runs", "first_bound_seconds"):
            value = search.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
                raise InputError(f"{where}: search.{key} is {value!r}; a number of at least 0 is needed")
        return Spent(
            search.get("seconds") or 0.0,
            search.get("moves") or 0,
            search.get("accepted") or 0,
            search.get("runs") or (1 if search.get("seconds") else 0),
            search.get("first_bound_seconds"),
        )

    def facts(self, report: SearchReport) -> dict[str, Any]:
        """The `search` of a schedule file: this run's settings, and the figures of all runs together."""
        reached = self.first_bound_seconds
        if reached is None and report.first_bound_seconds is not None:
            reached = self.seconds + report.first_bound_seconds
        return {
            "seed": report.seed,
            "ranks": report.ranks,
            "method": report.method,
            "objective": report.objective,
            "moves": self.moves + report.moves,
            "accepted": self.accepted + report.accepted,
            "seconds": round(self.seconds + report.seconds, 3),
            "first_bound_seconds": reached if reached is None else round(reached, 3),
            "runs": self.runs + 1,
        }


class ResultFile:
    """Writes the best schedule to `path`; owned by rank 0."""

    def __init__(self, path: str | Path, spent: Spent = Spent()) -> None:
        self.path, self.spent = Path(path), spent
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
            save_schedule(self.path, schedule, self.spent.facts(report))
            self.waiting = None
        except InputError as error:
            if last:
                raise
            if not self.failed:
                print(f"{error}; trying again with the next find", file=sys.stderr, flush=True)
            self.failed = True
        now = time.monotonic()
        self.next_write = now + min(10 * (now - begun), LONGEST_WAIT_SECONDS)
