"""samples.jsonl: a few samples of each iteration as text, for people who want to see what the actor writes.

A resumed run drops those of iterations that it is going to repeat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhfuse.base.files import AppendFile, read_lines, write_text
from rlhfuse.base.json_values import from_json, json_value


@dataclass(frozen=True)
class SampleText:
    """One sample. `tokens`: length of the response; `finish_reason`: stop or length; `split`: train, or val for one of
    the evaluation that follows the iteration (-1: that comes before the first)."""

    iteration: int
    sample_id: int
    prompt: str
    response: str
    score: float
    tokens: int
    finish_reason: str
    split: str = "train"


class SampleWriter(AppendFile):
    """Appends to `path`; samples of `first_iteration` and later ones, of a run that died, are dropped first."""

    def __init__(self, path: str | Path, first_iteration: int = 0) -> None:
        if Path(path).exists():
            kept = [sample for sample in read_samples(path) if sample.iteration < first_iteration]
            write_text(path, "".join(map(_line, kept)), durable=True)
        super().__init__(path)

    def write(self, samples: Iterable[SampleText]) -> None:
        """All of them, or none: raises InputError where the file cannot be written."""
        self.append("".join(map(_line, samples)).encode())


def _line(sample: SampleText) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def read_samples(path: str | Path) -> list[SampleText]:
    """All lines in order, without the unfinished last one of a killed run. Raises InputError naming file and line."""
    samples = []
    for number, line in read_lines(path, finished=True):
        where = f"{path}:{number}"
        samples.append(from_json(SampleText, json_value(line, where, own=False, fix="remove the line"), where))
    return samples
