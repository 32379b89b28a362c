"""metrics.jsonl: one JSON object per iteration, appended and flushed as soon as it is known.

Floats are written by `repr`, the shortest text that reads back to the same bits. JSON has no NaN or infinity: both
become null. A resumed run keeps the file up to the position that its checkpoint knew, byte for byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import AppendFile, read_lines
from rlhfuse.base.json_values import json_value

Metrics = Mapping[str, Any]  # numbers (of numpy and torch, too), texts, lists, None


class MetricsWriter(AppendFile):
    """Appends to `path`. Raises InputError when `keep_bytes` is not the end of a line: then it stays as it was."""

    def __init__(self, path: str | Path, keep_bytes: int | None = None) -> None:
        if keep_bytes and Path(path).exists():
            _check_end_of_line(Path(path), keep_bytes)
        super().__init__(path, keep_bytes)
        self._last = 0, b""  # where the last line begins, and itself

    def write(self, metrics: Metrics) -> None:
        """One line; `iteration` comes first, the others in alphabetical order. Scalars of numpy and torch will do."""
        line = (json.dumps(plain_metrics(metrics), allow_nan=False) + "\n").encode()
        begin = self.path.stat().st_size
        self.append(line)
        self._last = begin, line

    def write_again(self, metrics: Metrics) -> None:
        """In the place of the line that was written last, which stays where there is no room."""
        begin, line = self._last
        self.cut(begin)
        try:
            self.write(metrics)
        except InputError:
            self.append(line)
            raise


def plain_metrics(metrics: Metrics) -> dict[str, Any]:
    """As JSON values, in the order of a line."""
    return {name: _plain(metrics[name]) for name in sorted(metrics, key=lambda name: (name != "iteration", name))}


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(number: float) -> float | None:
    """As JSON can say it."""
    return number if math.isfinite(number) else None


def _check_end_of_line(path: Path, keep: int) -> None:
    with open(path, "rb") as file:
        file.seek(keep - 1)
        if file.read(1) != b"\n":
            raise InputError(
                f"{path}: byte {keep} is not the end of a line, so it was changed since; bring the file back"
            )


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All lines in order, without the unfinished last one of a killed run. Raises InputError naming file and line."""
    rows = []
    for number, line in read_lines(path, "give the folder of a run that wrote metrics", finished=True):
        row = json_value(line, f"{path}:{number}", fix="remove the line")
        if not isinstance(row, dict) or type(row.get("iteration")) is not int:
            raise InputError(f"{path}:{number} is not one iteration's metrics: no integer 'iteration'")
        rows.append(row)
    return rows
