"""Print how long each phase of a run's iterations took and what memory it needed, beside what was predicted.

    python tools/show_forecast.py runs/quickstart-20260101-120000 --skip 2
    python tools/show_forecast.py runs/quickstart-20260101-120000 --spans    where the differences come from

Times are predicted from the iterations before alone: with the iteration's own lengths, and without. Memory is
plan.json's, at most and with the run's lengths. Reads the run's metrics.jsonl and plan.json and writes forecast.json
beside them; trace.json holds the times as a time line (tools/show_timeline.py). `--spans` adds up that time line by
rank and kind of work, and prints the costs that the next iteration would be predicted with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlhfuse.costs.measured import load_measured_cost
from rlhfuse.errors import run_program
from rlhfuse.files import write_text
from rlhfuse.monitor.report.forecast_table import ForecastTable, read_metrics
from rlhfuse.monitor.report.memory_table import MemoryTable
from rlhfuse.monitor.report.span_table import span_rows, span_table
from rlhfuse.monitor.trace import load_trace
from rlhfuse.planning.plan import load_plan


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted and measured seconds of every phase of a training run.")
    parser.add_argument("run", help="run directory (a trainer.output_dir)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N iterations out")
    parser.add_argument("--spans", action="store_true", help="also by rank and kind of work, with the costs behind it")
    args = parser.parse_args()
    metrics = read_metrics(args.run)
    table, memory = ForecastTable.of(metrics, args.skip), MemoryTable.of(_plan(Path(args.run)), metrics)
    print(table.text())
    if memory:
        print(memory.text())
    written = Path(args.run) / "forecast.json"
    kept = table.to_dict() | {"memory": memory.to_dict() if memory else None}
    write_text(written, json.dumps(kept, indent=1) + "\n")
    print(f"written: {written}")
    if args.spans:
        print(f"\niterations of trace.json:\n{span_table(span_rows(load_trace(Path(args.run) / 'trace.json')))}")
        print(f"\ncosts.json:\n{load_measured_cost(Path(args.run) / 'costs.json')}")
    return 0


def _plan(run: Path) -> dict | None:
    """The run's plan, if it kept one."""
    return load_plan(run / "plan.json").to_dict() if (run / "plan.json").exists() else None


if __name__ == "__main__":
    run_program(main)
