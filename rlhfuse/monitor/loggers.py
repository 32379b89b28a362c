"""The metrics of each iteration on the terminal, in TensorBoard and in Weights & Biases.

Loggers are alike: `log` takes an iteration's metrics and its samples, `close` ends. What is missing in the metrics is
left out. TensorBoard and wandb take seconds to load, so only a run that wants them does.
"""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from rlhfuse.base.errors import writing
from rlhfuse.base.files import write_text
from rlhfuse.monitor.metrics import Metrics
from rlhfuse.monitor.samples import SampleText


class Logger(Protocol):
    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None: ...

    def close(self) -> None: ...


def _numbers(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Every finite number but the iteration itself, by name; scalars of numpy and torch too."""
    for name, value in metrics.items():
        number = value.item() if hasattr(value, "item") else value
        finite = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        if finite and name != "iteration":
            yield name, number


class ProgressPrinter:
    """One line per iteration, with colour on a terminal; `iterations` is the number planned.

    iteration  3/10  score +0.412  kl 0.0131  length 87.2  (3% cut)  4,210 tokens/s  2.10 s: gen 52%, train 31%
    """

    def __init__(self, iterations: int, stream: TextIO = sys.stdout) -> None:
        self._iterations = iterations
        self._console = Console(file=stream, highlight=False, soft_wrap=True)

    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None:
        with writing("standard output"):
            self._console.print(Text("  ").join(Text(*part) for part in progress_parts(metrics, self._iterations)))

    def close(self) -> None:
        """Nothing to do: the stream is not ours."""


def progress_parts(metrics: Metrics, iterations: int) -> list[tuple[str, str]]:
    """(text, style) of each piece of the line."""
    number, width = int(metrics["iteration"]), len(str(iterations))
    parts = [("before training" if number < 0 else f"iteration {number:{width}d}/{iterations}", "bold")]
    for name, text, style in (
        ("paced", "PACED {}", "bold red"),
        ("critic/score/mean", "score {:+.3f}", "green"),
        ("val/score/mean", "held-out {:+.3f}", "green"),
        ("actor/ref_kl", "kl {:.4f}", "yellow"),
        ("response_length/mean", "length {:.1f}", ""),
        ("response_length/clip_ratio", "({:.0%} cut)", "dim"),
        ("perf/throughput", "{:,.0f} tokens/s", "cyan"),
    ):
        if metrics.get(name) is not None:
            parts.append((text.format(metrics[name]), style))
    if metrics.get("timing_s/step"):
        parts.append((f"{metrics['timing_s/step']:.2f} s{_shares(metrics)}", "dim"))
    return parts


def _shares(metrics: Metrics) -> str:
    """Parts of the iteration's time, largest first; what is below one percent is left out."""
    whole = metrics["timing_s/step"]
    times = {
        name.removeprefix("timing_s/"): value / whole
        for name, value in metrics.items()
        if name.startswith("timing_s/")
        and name not in ("timing_s/step", "timing_s/eval", "timing_s/graph_capture")
        and value is not None
        and value >= 0.01 * whole
    }
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return ": " + ", ".join(f"{name} {share:.0%}" for name, share in ordered) if ordered else ""


class TensorBoardLogger:
    """Scalars and texts in `folder`. On resume, events from `first_iteration` on are hidden by the reader.

    Raises InputError naming the folder where it cannot be written; iterations logged before can still be read.
    """

    def __init__(self, folder: str | Path, first_iteration: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=first_iteration)

    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None:
        """All of it is on its way to disk when this returns: the writer's thread reports a full disk at `flush`."""
        with writing(self._folder):
            for name, number in _numbers(metrics):
                self._writer.add_scalar(name, number, int(metrics["iteration"]))
            for number, sample in enumerate(samples):
                shown = f"{sample.score:+.3f}  **{sample.prompt}** {sample.response}"
                name = "samples" if sample.split == "train" else f"{sample.split}_samples"
                self._writer.add_text(f"{name}/{number}", shown, sample.iteration)
            self._writer.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


class WandbLogger:
    """A run below `folder`/wandb; it keeps one id for its whole life, so that a resumed run continues its curves.

    The iterations that a resumed run repeats are the same to the last bit; the server keeps the first of two values
    for a step.
    """

    def __init__(
        self, folder: str | Path, project: str, mode: Literal["online", "offline"], config: dict[str, Any]
    ) -> None:
        import wandb

        self._wandb, folder = wandb, Path(folder)
        settings, run_id = wandb.Settings(console="off", silent=True), _run_id(folder / "wandb_id")
        where: dict[str, Any] = {"project": project, "id": run_id, "name": folder.name, "dir": str(folder)}
        self._run = wandb.init(**where, mode=mode, resume="allow", config=config, settings=settings)

    def log(self, metrics: Metrics, samples: Iterable[SampleText] = ()) -> None:
        """Every finite number under its own name, and the samples as a table; steps are counted from 0, not from -1."""
        row: dict[str, Any] = {"iteration": metrics["iteration"], **dict(_numbers(metrics))}
        columns = ["iteration", "split", "prompt", "response", "score"]
        table = [[getattr(sample, column) for column in columns] for sample in samples]
        if table:
            row["samples"] = self._wandb.Table(columns=columns, data=table)
        self._run.log(row, step=int(metrics["iteration"]) + 1)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # waits for the service process, which may still be writing the file of an offline run


def _run_id(path: Path) -> str:
    """The run's id, made at its first start."""
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:8] + "\n")
    return path.read_text(encoding="utf-8").strip()
