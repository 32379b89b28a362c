"""Print how long each phase of a run's iterations took, beside what was predicted before it began.

    python tools/show_forecast.py runs/quickstart-20260101-120000 --skip 2

Predictions come from the iterations before alone: with the iteration's own lengths, and without. Reads the run's
metrics.jsonl and writes forecast.json beside it; trace.json holds the same as a time line (tools/show_timeline.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlhfuse.errors import run_program
from rlhfuse.monitor.forecast_table import ForecastTable, read_metrics
from rlhfuse.schedule.io import write_text


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted and measured seconds of every phase of a training run.")
    parser.add_argument("run", help="run directory (a trainer.output_dir)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N iterations out")
    args = parser.parse_args()
    table = ForecastTable.of(read_metrics(args.run), args.skip)
    print(table.text())
    written = Path(args.run) / "forecast.json"
    write_text(written, json.dumps(table.to_dict(), indent=1) + "\n")
    print(f"written: {written}")
    return 0


if __name__ == "__main__":
    run_program(main)
