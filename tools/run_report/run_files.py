"""What a run left in its directory, read back as values.

Only metrics.jsonl and config.yaml must be there; whatever else is missing (a run that was killed early, logs that were
switched off) is None or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlhfuse.base.clock import GROUPS, Span
from rlhfuse.base.errors import InputError
from rlhfuse.base.files import read_text
from rlhfuse.base.json_values import from_json, read_json
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.monitor.samples import SampleText, read_samples
from rlhfuse.monitor.trace import MICROSECONDS
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.io import load_family, load_schedule
from rlhfuse.schedule.ir.schedule import Schedule


@dataclass(frozen=True)
class RunFiles:
    """`plan` is plan.json as it is written, None too where another release has written it; `others`: schedules for
    other numbers of micro-batches; `rows` one object per iteration; `spans` those of trace.json.

    `evaluations`: lines of metrics.jsonl with held-out scores; the first may be of iteration -1, which is none of
    `rows`. One of the two has an entry.
    """

    folder: Path
    config: str
    rows: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    plan: dict[str, Any] | None
    schedule: Schedule | None
    others: tuple[Schedule, ...]
    spans: tuple[Span, ...]
    samples: tuple[SampleText, ...]
    finished: bool

    @staticmethod
    def read(folder: str | Path) -> RunFiles:
        """Raises InputError naming what is missing or broken."""
        run = Path(folder)
        if not run.is_dir():
            raise InputError(f"{run} is no folder; give a run directory (a trainer.output_dir)")
        rows = read_metrics(run / "metrics.jsonl")
        if not rows:
            raise InputError(f"{run / 'metrics.jsonl'} holds no iteration yet")
        config = read_text(run / "config.yaml", "give a run directory (a trainer.output_dir)")
        return RunFiles(
            folder=run,
            config=config,
            rows=tuple(row for row in rows if row["iteration"] >= 0),
            evaluations=tuple(row for row in rows if "val/score/mean" in row),
            plan=_plan(run / "plan.json"),
            schedule=load_schedule(run / "schedule.json") if (run / "schedule.json").exists() else None,
            others=tuple(load_family(run / "schedule.json").values()) if (run / "schedule.json").exists() else (),
            spans=tuple(load_trace(run / "trace.json")) if (run / "trace.json").exists() else (),
            samples=tuple(read_samples(run / "samples.jsonl")) if (run / "samples.jsonl").exists() else (),
            finished=(run / "finished.json").exists(),
        )

    @cached_property
    def _settings(self) -> dict[str, dict[str, Any]]:
        try:
            return yaml.safe_load(self.config) or {}
        except yaml.YAMLError as error:
            why = " ".join(str(error).split())
            raise InputError(f"{self.folder / 'config.yaml'} is not valid YAML: {why}") from None

    def setting(self, section: str, key: str) -> Any:
        """A value of config.yaml, e.g. ("fusion", "bs_max"); None where it has none."""
        return (self._settings.get(section) or {}).get(key)

    def traced_iterations(self) -> dict[int, list[Span]]:
        """The spans of each iteration in trace.json; on every rank one begins with its move of weights."""
        iterations: dict[int, list[Span]] = {}
        current: dict[int, int] = {}  # rank -> iteration
        for span in sorted(self.spans, key=lambda span: span.start_seconds):
            if span.kind == "reshard" and "iteration" in span.args:
                current[span.rank] = span.args["iteration"]
            if span.rank in current:
                iterations.setdefault(current[span.rank], []).append(span)
        return dict(sorted(iterations.items()))


def _plan(file: Path) -> dict[str, Any] | None:
    raw = read_json(file) if file.exists() else {}
    return raw if raw.get("version") == PlanReport.version else None


def load_trace(path: str | Path) -> list[Span]:
    """The spans of a file written by `save_trace`, times exact to the nanosecond. Raises InputError."""
    raw = read_json(path, fix="a run writes it as trace.json")
    try:
        spans = [
            {
                "name": event["name"],
                "kind": event["cat"],
                "rank": event["tid"],
                "start_seconds": event["ts"] / MICROSECONDS,
                "end_seconds": (event["ts"] + event["dur"]) / MICROSECONDS,
                "group": GROUPS[event["pid"]],
                "args": event["args"],
            }
            for event in raw["traceEvents"]
            if event["ph"] == "X"
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(f"{path} is not a trace written by this program ({type(error).__name__}: {error})") from None
    return from_json(list[Span], spans, str(path))
