"""The same metrics as a Weights & Biases run, online or offline.

A file of its own because the package is an optional extra (`pip install rlhfuse[wandb]`) and slow to load. A run
keeps one id for its whole life, in its directory, so that a resumed run continues its curves. The iterations that a
resumed run repeats are the same to the last bit; the server keeps the first of two values for a step.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhfuse.errors import InputError
from rlhfuse.files import write_text
from rlhfuse.monitor.metrics import Metrics
from rlhfuse.monitor.samples import SampleText

MODES = ("online", "offline")


class WandbLogger:
    """Writes below `folder`/wandb. Raises InputError where the mode is unknown."""

    def __init__(self, folder: str | Path, project: str, mode: str, config: dict[str, Any]) -> None:
        if mode not in MODES:
            raise InputError(f"trainer.wandb={mode!r} is not one of off, {', '.join(MODES)}")
        import wandb

        self._wandb = wandb
        folder = Path(folder)
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=project,
            id=_run_id(folder / "wandb_id"),
            name=folder.name,
            dir=str(folder),
            mode=mode,
            resume="allow",
            config=config,
            settings=settings,
        )

    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None:
        """Every finite number under its own name at step `iteration`, and the samples as a table."""
        row: dict[str, Any] = {}
        for name, value in metrics.items():
            number = value.item() if hasattr(value, "item") else value
            if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number):
                row[name] = number
        table = [[one.iteration, one.prompt, one.response, one.score] for one in samples]
        if table:
            row["samples"] = self._wandb.Table(columns=["iteration", "prompt", "response", "score"], data=table)
        self._run.log(row, step=int(metrics["iteration"]))

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # waits for the service process, which may still be writing the file of an offline run


def _run_id(path: Path) -> str:
    """The run's id, made at its first start."""
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:8] + "\n")
    return path.read_text(encoding="utf-8").strip()
