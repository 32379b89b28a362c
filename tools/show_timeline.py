"""Draw the last iteration of a run: what every rank did, measured, below what was predicted.

    python tools/show_timeline.py runs/quickstart-20260101-120000 --png timeline.png

Reads the run's trace.json, which Perfetto (ui.perfetto.dev) opens as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhfuse.errors import InputError, run_program
from rlhfuse.monitor.trace import Span, draw_iteration, load_trace


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the last iteration of a run, predicted and measured.")
    parser.add_argument("run", help="run directory (a trainer.output_dir)")
    parser.add_argument("--png", "--out", dest="out", required=True, metavar="FILE", help="picture: .png, .svg or .pdf")
    parser.add_argument("--measured-only", action="store_true", help="leave the prediction out")
    args = parser.parse_args()
    spans = last_iteration(load_trace(Path(args.run) / "trace.json"))
    if args.measured_only:
        spans = [span for span in spans if span.group == "measured"]
    draw_iteration(spans, args.out, title="one iteration")
    print(f"wrote {args.out}: {len(spans)} spans")
    return 0


def last_iteration(spans: list[Span]) -> list[Span]:
    """The spans from the last move of weights on, which begins an iteration."""
    starts = [span.start_seconds for span in spans if span.kind == "reshard" and span.group == "measured"]
    if not starts:
        raise InputError("the trace holds no iteration that began with a move of weights; give a run of train_ppo")
    ranks = len({span.rank for span in spans if span.kind == "reshard"})
    begin = sorted(starts)[-ranks]
    return [span for span in spans if span.start_seconds >= begin]


if __name__ == "__main__":
    run_program(main)
