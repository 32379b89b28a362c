"""The same metrics as TensorBoard scalars.

A file of its own because loading TensorBoard takes seconds: only a run that wants it imports it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Iterable

from torch.utils.tensorboard import SummaryWriter

from rlhfuse.monitor.metrics import Metrics
from rlhfuse.monitor.samples import SampleText


class TensorBoardLogger:
    """Writes event files into `folder`. On resume, events from `first_iteration` on are hidden by the reader."""

    def __init__(self, folder: str | Path, first_iteration: int | None = None) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_iteration)

    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None:
        """Every finite number under its own name at step `iteration`, and the samples as text; null is left out."""
        for name, value in metrics.items():
            number = value.item() if hasattr(value, "item") else value
            if name != "iteration" and isinstance(number, (int, float)) and math.isfinite(number):
                self._writer.add_scalar(name, number, int(metrics["iteration"]))
        for number, one in enumerate(samples):
            text = f"{one.score:+.3f}  **{one.prompt}** {one.response}"
            self._writer.add_text(f"samples/{number}", text, one.iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
