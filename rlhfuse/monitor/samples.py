"""samples.jsonl: a few samples of each iteration as text, for people who want to see what the actor writes.

A resumed run keeps the file up to the position that its checkpoint knew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhfuse.base.files import AppendFile
from rlhfuse.base.json_values import read_json_lines
from rlhfuse.monitor.metrics import finite_or_none


@dataclass(frozen=True)
class TurnText:
    """One turn of a sample that calls tools, what was observed behind it, and the seconds that this took."""

    drawn: str
    observed: str
    seconds: float


@dataclass(frozen=True)
class SampleText:
    """One sample. `tokens`: length of the response; `finish_reason`: stop or length; `split`: train, or val for one of
    the evaluation that follows the iteration (-1: that comes before the first)."""

    iteration: int
    sample_id: int
    prompt: str
    response: str
    score: float | None  # None for what is not finite
    tokens: int
    finish_reason: str
    split: str = "train"
    turns: tuple[TurnText, ...] = ()  # of one that called tools


class SampleWriter(AppendFile):
    """Appends to a file. Lines that stay are not looked at: what people read stops no run."""

    def write(self, samples: Iterable[SampleText]) -> None:
        """All of them, or none: raises InputError where the file cannot be written."""
        self.append("".join(map(_line, samples)).encode())


def _line(sample: SampleText) -> str:
    raw = asdict(sample) | {"score": finite_or_none(sample.score) if sample.score is not None else None}
    if not sample.turns:
        del raw["turns"]
    return json.dumps(raw, ensure_ascii=False, allow_nan=False) + "\n"


def read_samples(path: str | Path) -> list[SampleText]:
    """All lines in order, without the unfinished last one of a killed run. Raises InputError naming file and line."""
    return read_json_lines(SampleText, path)
