"""The papers' figures and tables that can be computed, beside what this project gets, on one self-contained HTML page.

    python benchmarks/paper_page.py [--out page.html]

What is cheap is computed with the page. Figures that take longer come from benchmarks/results, each with its date:
run schedule_search.py for newer ones. The programs of paper_settings, real_tables and real_plans are deleted.
"""

from __future__ import annotations

import argparse
import time

from harness import RESULTS, git, machine
from page_figures import load_results
from paper.computed import SECTIONS
from paper.page import contents_of, page

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_text
from rlhfuse.tools.program import run_program

NEEDED = ("paper_settings", "real_plans", "real_tables", "schedule_table")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", metavar="FILE", default="page.html", help="[%(default)s]")
    out = parser.parse_args().out
    begun = time.monotonic()
    for name in NEEDED:
        if not (file := RESULTS / f"{name}.json").exists():
            raise InputError(f"{file} is not there; check it out, or measure it again")
    results = load_results(RESULTS)
    contents = contents_of(results, SECTIONS)
    computer = machine()
    facts = (
        f"Commit {git('rev-parse', '--short', 'HEAD')}, {time.strftime('%Y-%m-%d')}, {computer['cpu']}, "
        f"{computer['cores']} cores. Nothing on this page was measured on GPUs: ours are computed, simulated, or "
        "found by search. 'Not at hand' is a value that the paper prints nowhere as a number."
    )
    write_text(out, page(facts, results, contents))
    rows = sum(len(one.rows) + sum(len(rows) for *_, rows in one.tables) for one in contents.values())
    print(f"{out}: {len(contents)} sections, {rows} rows, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    run_program(main)
