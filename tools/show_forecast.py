"""Print how long each phase of a run's iterations took and what memory it needed, beside what was predicted.

    python tools/show_forecast.py runs/quickstart-20260101-120000 --skip 2
    python tools/show_forecast.py runs/quickstart-20260101-120000 --spans    where the differences come from

Each iteration is predicted from those before it in metrics.jsonl, generation and inference by simulation at the costs
of costs.json; with the iteration's own lengths, and without. Memory is plan.json's, at most and with the run's lengths.
Writes forecast.json into the run directory. `--spans` adds up the iterations of trace.json by rank and kind of work
(tools/show_timeline.py draws the last), and prints the costs.
"""

from __future__ import annotations

import argparse

from run_report.forecast import predicted_spans
from run_report.forecast_table import ForecastTable, span_table
from run_report.run_files import RunFiles

from rlhfuse.base.errors import run_program
from rlhfuse.base.files import write_json
from rlhfuse.costs.measured import load_measured_cost
from rlhfuse.monitor.memory_table import MemoryTable


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted and measured seconds of every phase of a training run.")
    parser.add_argument("run", help="run directory (a trainer.output_dir)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N iterations out")
    parser.add_argument("--spans", action="store_true", help="also by rank and kind of work, with the costs behind it")
    args = parser.parse_args()
    run = RunFiles.read(args.run)
    table, memory = ForecastTable.of(run, args.skip), MemoryTable.of(run.plan, run.rows)
    print(table.text())
    if memory:
        print(memory.text())
    written = run.folder / "forecast.json"
    values = table.to_dict() | {"memory": memory.to_dict() if memory else None}
    write_json(written, values)
    print(f"written: {written}")
    if args.spans:
        kept = {number: spans for number, spans in run.traced_iterations().items() if number in table.iterations}
        spans = [span for number in kept for span in (*kept[number], *predicted_spans(run, number)[0])]
        print(f"\niterations of trace.json:\n{span_table(spans)}")
        print(f"\ncosts.json:\n{load_measured_cost(run.folder / 'costs.json')}")
    return 0


if __name__ == "__main__":
    run_program(main)
