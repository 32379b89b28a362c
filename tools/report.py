"""Write a run's report: one HTML page that says whether it learned, where the time went and what fusion brought.

    python tools/report.py runs/quickstart-20260101-120000

Then plan against measured, all curves, the timeline, the schedule, samples. The page holds everything itself and opens
offline. A run that is still going, or was killed, is shown as far as it is.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from program import run_program
from run_report.report import render_report
from run_report.run_files import RunFiles

from rlhfuse.base.errors import InputError


def main() -> int:
    parser = argparse.ArgumentParser(description="Write one self-contained HTML page about a run.")
    parser.add_argument("run", help="run directory (a trainer.output_dir)")
    parser.add_argument("--out", metavar="HTML", help="page to write; default: report.html in the run directory")
    args = parser.parse_args()
    page = render_report(RunFiles.read(args.run))
    out = Path(args.out) if args.out else Path(args.run) / "report.html"
    beside = out.with_name(out.name + ".tmp")
    try:
        beside.write_text(page, encoding="utf-8")
        os.replace(beside, out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}; give another --out") from None
    print(f"wrote {out}: {len(page) / 1e6:.2f} MB")
    return 0


run = partial(run_program, main)  # the installed program

if __name__ == "__main__":
    run()
