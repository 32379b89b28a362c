"""metrics.jsonl: one JSON object per iteration, appended and flushed as soon as it is known.

Floats are written by `repr`, the shortest text that reads back to the same bits, so two runs can be compared
exactly. JSON has no NaN or infinity: both become null. A resumed run drops the lines of iterations that it is
going to repeat, and the unfinished last line of a killed one. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Mapping

from rlhfuse.errors import InputError

Metrics = Mapping[str, float | int | str | bool | None]


class MetricsWriter:
    """Appends to `path`. With `first_iteration`, lines of that iteration and later ones are dropped first."""

    def __init__(self, path: str | Path, first_iteration: int | None = None) -> None:
        self.path = Path(path)
        if self.path.exists():
            _repair(self.path, first_iteration)
        self._stream = open(self.path, "a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """One line; `iteration` comes first, the others in alphabetical order. Scalars of numpy and torch will do."""
        plain = {name: _plain(metrics[name]) for name in sorted(metrics, key=lambda name: (name != "iteration", name))}
        self._stream.write(json.dumps(plain, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _repair(path: Path, first_iteration: int | None) -> None:
    """Rewrite the file beside itself without what the run is going to write again."""
    kept = [row for row in read_metrics(path) if first_iteration is None or row["iteration"] < first_iteration]
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(beside, path)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines in order; a last line without its end (a killed run) is left out.

    Raises InputError naming file and line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; give the folder of a run that wrote metrics") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{file} cannot be read ({error})") from None
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}:{number} is not valid JSON ({error.msg}); remove the line") from None
        if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
            raise InputError(f"{file}:{number} is not one iteration's metrics: no integer 'iteration'")
        rows.append(row)
    return rows
