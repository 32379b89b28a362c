"""Everything that a run writes for people: rank 0's files, loggers and lines on the terminal.

A resumed run goes on in all of them from the iteration it resumes at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfuse.base.clock import Span
from rlhfuse.base.time_budget import TimeBudget
from rlhfuse.config.settings import RunConfig
from rlhfuse.monitor.loggers import Logger, ProgressPrinter, TensorBoardLogger, WandbLogger
from rlhfuse.monitor.memory_table import MemoryTable
from rlhfuse.monitor.metrics import MetricsWriter
from rlhfuse.monitor.phase_times import render_phase_times
from rlhfuse.monitor.samples import SampleWriter
from rlhfuse.monitor.trace import save_trace
from rlhfuse.planning.plan import Plan
from rlhfuse.run.checkpoint.checkpoint import METRICS
from rlhfuse.run.evaluation import Evaluation
from rlhfuse.run.iteration_recorder import IterationRecord

TRACE_SHARE = 0.005  # of the time may go into writing trace.json again; the end of a run always does


class RunLog:
    """The open files of one run."""

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        plan: Plan,
        first_iteration: int,
        metrics_bytes: int | None,
        samples_bytes: int | None,
    ) -> None:
        """Go on with so many bytes of metrics.jsonl and samples.jsonl; None for all of them."""
        self._plan, self._run_dir, self._trace_iterations = plan, run_dir, config.trainer.trace_iterations
        self._metrics = MetricsWriter(run_dir / METRICS, keep_bytes=metrics_bytes)
        self._samples = SampleWriter(run_dir / "samples.jsonl", samples_bytes)
        self._loggers = _loggers(run_dir, config, first_iteration)
        self._rows: list[dict[str, Any]] = []
        self._traced: list[list[Span]] = []
        self._traces = TimeBudget(TRACE_SHARE)

    def write(self, record: IterationRecord) -> None:
        """One iteration, or the evaluation before the first. Raises InputError naming a file that cannot be written."""
        metrics, spans, samples = record
        self._metrics.write(metrics)
        self._samples.write(samples)
        for logger in self._loggers:
            logger.log(metrics, samples)
        if metrics["iteration"] < 0:
            return
        self._rows.append({name: value for name, value in metrics.items() if not isinstance(value, list)})
        self._traced = [*self._traced, spans][-self._trace_iterations :]
        if self._traces.due():
            self._save_trace()

    def complete(self, record: IterationRecord, evaluation: Evaluation) -> None:
        """The evaluation after the iteration that was written last joins its line. Raises InputError as `write`."""
        whole = record.metrics | evaluation.metrics
        self._metrics.write_again(whole)
        self._samples.write(evaluation.samples)
        for logger in self._loggers:
            logger.log({"iteration": whole["iteration"], **evaluation.metrics}, evaluation.samples)
        self._rows[-1] |= evaluation.metrics

    def _save_trace(self) -> None:
        with self._traces.spend():
            save_trace([span for spans in self._traced for span in spans], self._run_dir / "trace.json")

    def position(self) -> dict[str, int]:
        """Bytes of metrics.jsonl and samples.jsonl so far, all of them on disk when this returns."""
        return {"metrics_bytes": self._metrics.position(), "samples_bytes": self._samples.position()}

    def close(self) -> None:
        """Print the tables of the run. Raises InputError naming the file that cannot be written."""
        if self._rows:
            self._save_trace()
            print(paced_line(self._rows), end="")
            print(render_phase_times(self._rows), flush=True)
            if table := MemoryTable.of(self._plan.document, self._rows):
                print(table.text(), flush=True)
        for opened in (self._metrics, self._samples, *self._loggers):
            opened.close()


def paced_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the times of a paced run are and how far they are evidence, for people; '' of any other."""
    paced = [row for row in rows if "paced" in row]
    if not paced:
        return ""
    names = "machine_cpu_share", "late_share", "largest_lateness_seconds", "python_seconds", "python_share"
    cpu, late, lateness, python, share = (max(row[f"paced/{name}"] for row in paced) for name in names)
    good = sum(row["paced"].endswith(": evidence") for row in paced)
    return (
        f"paced run, no measurement of hardware; {paced[-1]['paced']}; {good} of {len(paced)} iterations are evidence\n"
        f"at most: CPU {cpu:.0%} of the machine, late {late:.2%} by up to {1e3 * lateness:.3g} ms; Python and messages "
        f"of the busiest rank {1e3 * python:.4g} ms an iteration, {share:.0%} of it without the stretch\n"
    )


def _loggers(run_dir: Path, config: RunConfig, first_iteration: int) -> list[Logger]:
    """The terminal's and those that are switched on."""
    trainer = config.trainer
    loggers: list[Logger] = []
    if trainer.tensorboard:
        loggers.append(TensorBoardLogger(run_dir / "tensorboard", first_iteration))
    if trainer.wandb != "off":
        loggers.append(WandbLogger(run_dir, trainer.wandb_project, trainer.wandb, config.model_dump(mode="json")))
    return [*loggers, ProgressPrinter(trainer.iterations)]
