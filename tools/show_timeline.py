"""Draw the last iteration of a run: what every rank did, measured, below what was predicted.

    python tools/show_timeline.py runs/quickstart-20260101-120000 --png timeline.png

Reads the run's trace.json, which Perfetto (ui.perfetto.dev) opens as well, and what a prediction needs: metrics.jsonl,
costs.json, plan.json and schedule.json. Without one of these the picture shows what was measured, and says why.
"""

from __future__ import annotations

import argparse

from run_report.forecast import predicted_spans
from run_report.iteration_picture import draw_iteration
from run_report.run_files import RunFiles

from rlhfuse.base.errors import InputError, run_program


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the last iteration of a run, predicted and measured.")
    parser.add_argument("run", help="run directory (a trainer.output_dir)")
    parser.add_argument("--png", "--out", dest="out", required=True, metavar="FILE", help="picture: .png, .svg or .pdf")
    parser.add_argument("--measured-only", action="store_true", help="leave the prediction out")
    args = parser.parse_args()
    run = RunFiles.read(args.run)
    if not (traced := run.traced_iterations()):
        raise InputError("the trace holds no iteration that began with a move of weights; give a run of train_ppo")
    predicted, reason = ([], "") if args.measured_only else predicted_spans(run, max(traced))
    if reason:
        print(f"nothing is predicted: {reason}")
    spans = [*predicted, *traced[max(traced)]]
    draw_iteration(spans, args.out, title="one iteration")
    print(f"wrote {args.out}: {len(spans)} spans")
    return 0


if __name__ == "__main__":
    run_program(main)
