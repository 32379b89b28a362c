"""The journal of a run's tool calls: what each was answered, written before the model observes it.

tool_calls.RANK.jsonl lies in the run's folder, one file a leader. A repeated iteration, and a run that replays
another, looks its calls up by place and contents, and makes only those anew that are not there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import AppendFile
from rlhfuse.base.json_values import read_json_lines
from rlhfuse.data.tool_set import ToolCall

FILES = "tool_calls.*.jsonl"
REPLAY = "rollout.multi_turn.replay"


def _check_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


@dataclass(frozen=True)
class JournalEntry:
    """A call and its answer. `iteration` names the samples, as 3, 3/round-1 or 3/val; `error` is '' or what failed."""

    iteration: Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,18}(/.*)?$")]
    sample_id: int
    number: int
    digest: str
    tool: str
    arguments: str  # as JSON
    answer: str
    error: str
    seconds: float
    state: Annotated[str, AfterValidator(_check_base64)] | None = None  # of the environment after the call, in base 64

    @staticmethod
    def of(
        iteration: str, call: ToolCall, answer: str, error: str, seconds: float, state: bytes | None
    ) -> JournalEntry:
        kept = None if state is None else base64.b64encode(state).decode()
        told = call.sample_id, call.number, call.digest, call.tool, json.dumps(call.arguments)
        return JournalEntry(iteration, *told, answer, error, seconds, kept)

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.iteration, self.sample_id, self.number, self.digest

    @property
    def state_bytes(self) -> bytes | None:
        return None if self.state is None else base64.b64decode(self.state)


class ToolJournal:
    """Appends to this rank's file; knows what stood in the run's folder at the start, and in the one to replay."""

    def __init__(self, folder: Path, rank: int, first: int | None, replay: str = "") -> None:
        """`first`: the iteration with which the folder's run goes on, and may repeat the evaluation before; None: it
        begins, and this rank's file anew. Raises InputError."""
        known = _entries(Path(replay)) if replay else []
        if first is not None:
            known += [entry for entry in _entries(folder) if int(entry.iteration.split("/")[0]) + 1 >= first]
        self._known = {entry.key: entry for entry in known}
        self._file = AppendFile(folder / FILES.replace("*", str(rank)), keep_bytes=0 if first is None else None)

    def find(self, iteration: str, call: ToolCall) -> JournalEntry | None:
        """What is known of this call."""
        return self._known.get((iteration, call.sample_id, call.number, call.digest))

    def append(self, entry: JournalEntry) -> None:
        """Write it down; the system has it when this returns. Raises InputError."""
        self._file.append((json.dumps(asdict(entry), ensure_ascii=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def journal_files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob(FILES))


def _entries(folder: Path) -> list[JournalEntry]:
    return [entry for file in journal_files(folder) for entry in read_json_lines(JournalEntry, file)]


def check_replay(folder: str) -> None:
    """Raise InputError unless the folder holds journals."""
    if folder and not journal_files(Path(folder)):
        raise InputError(f"{REPLAY}={folder} has no {FILES}; give the folder of a run that called tools")
