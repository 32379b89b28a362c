"""The same metrics as TensorBoard scalars.

An event file is a row of records, each a serialised `Event`; TensorBoard's own functions make both. They are appended
here, an iteration at a time, and not by its `SummaryWriter`, whose thread meets a full disk where nobody can answer.
A file of its own because loading TensorBoard takes seconds: only a run that wants it imports it.
"""

from __future__ import annotations

import io
import math
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from rlhfuse.errors import writing
from rlhfuse.files import AppendFile
from rlhfuse.monitor.metrics import Metrics
from rlhfuse.monitor.samples import SampleText

FILE_VERSION = "brain.Event:2"


class TensorBoardLogger:
    """Writes an event file into `folder`. On resume, events from `first_iteration` on are hidden by the reader.

    Raises InputError naming the file where it cannot be written; what was logged before can still be read.
    """

    def __init__(self, folder: str | Path, first_iteration: int | None = None) -> None:
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        with writing(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(Path(folder) / name)
        events = [Event(wall_time=time.time(), file_version=FILE_VERSION)]
        if first_iteration is not None:
            started = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=first_iteration, session_log=started))
        self._file.append(_records(events))

    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None:
        """Every finite number under its own name at step `iteration`, and the samples as text; null is left out."""
        step = int(metrics["iteration"])
        found = []
        for name, value in metrics.items():
            number = value.item() if hasattr(value, "item") else value
            if name != "iteration" and isinstance(number, (int, float)) and math.isfinite(number):
                found.append(_event(scalar(name, number), step))
        for number, one in enumerate(samples):
            shown = f"{one.score:+.3f}  **{one.prompt}** {one.response}"
            found.append(_event(text(f"samples/{number}", shown), one.iteration))
        self._file.append(_records(found))

    def close(self) -> None:
        self._file.close()


def _event(summary: Summary, step: int) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)


def _records(events: Iterable[Event]) -> bytes:
    """With the lengths and checksums of the file format."""
    out = io.BytesIO()
    writer = RecordWriter(out)
    for event in events:
        writer.write(event.SerializeToString())
    return out.getvalue()
