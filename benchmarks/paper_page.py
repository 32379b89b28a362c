"""The papers' figures and tables that can be computed, beside what this project gets, on one self-contained HTML page.

    python benchmarks/paper_page.py [--out page.html]

What is cheap is computed with the page. Figures that take longer are those of benchmarks/results: real_tables,
real_plans, paper_settings, schedule_table, each with its date; run the program of that name to have newer ones.
"""

from __future__ import annotations

import argparse
import time

from harness import RESULTS, git, machine
from paper import of_puzzle, of_real, of_rlhfuse
from paper.page import Section, page

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.base.files import write_text
from rlhfuse.base.json_values import read_json

TITLE = "What the papers print, and what this project gets"
NEEDED = ("paper_settings", "real_plans", "real_tables", "schedule_table")
MISSING = (
    (
        "2.5-3.7 times the throughput of DeepSpeed-Chat, 1.4-2.4 times that of ReaLHF",
        "RLHFuse, 7.1",
        "against other systems on 256 GPUs: their engines differ in more than fusion, and no such cluster is at hand",
    ),
    (
        "samples per second of Figure 7, seconds of Figures 8 and 9",
        "RLHFuse",
        "pictures without numbers; prompt lengths, layouts, padding, BS_max and the cache's size are not stated",
    ),
    (
        "the internal model's iterations by maximum length, LMSYS-Chat-1M's lengths",
        "RLHFuse, Figure 2",
        "the model is not public, the data set is not part of this project; only shares are compared",
    ),
    ("others below 3% of an iteration", "RLHFuse, 7.2", "a measurement of their runtime"),
    ("seconds of the schedule search on 768 cores", "RLHFuse, 6", "another machine; schedule_table has ours"),
    (
        "2.0-10.6 times the throughput of DeepSpeed-Chat and OpenRLHF; hours of Table 3",
        "ReaLHF, 8.1",
        "against other systems on 128 A100",
    ),
    (
        "GPU time by kind of kernel, profiling below 4 minutes, parameter transfer 2.2% of GPU time",
        "ReaLHF, 8.2, 8.3",
        "measurements of their runtime",
    ),
    (
        "+42% where the critic trains beside the next generation, 8.4",
        "ReaLHF",
        "tools/plan.py --what-if prices such a placement; the setting of that figure is not rebuilt here",
    ),
    ("estimator within 28% in 27 trials", "ReaLHF, 8.3", "the trials are not printed one by one"),
    (
        "Tables I-V and the step times",
        "FlexRLHF",
        "against generation by ZeRO-3 and trlX's engine, neither of which is at hand; LoRA, largest batch before "
        "memory ends, mixes of devices",
    ),
    ("30-50% of devices for the actor", "FlexRLHF", "a guideline for its own placements, with its own engine"),
    ("end to end 1.83 and 1.50, Figures 8 and 12", "PUZZLE", "against DeepSpeed-Chat on two clusters"),
    (
        "Figures 9 and 10, up to 1.12 and 1.34",
        "PUZZLE, 7.3",
        "layouts of the five configurations are not printed; equation (1), which they follow, is on this page",
    ),
    ("switching 7B/350M and 13B/350M, Table 3", "PUZZLE", "their layouts are not printed"),
    ("Figure 3 (b)", "PUZZLE", "a picture without numbers"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", metavar="FILE", default="page.html", help="[%(default)s]")
    out = parser.parse_args().out
    begun = time.monotonic()
    results = {}
    for name in NEEDED:
        file = RESULTS / f"{name}.json"
        if not file.exists():
            raise InputError(
                f"{file} is not there; run benchmarks/{name.replace('schedule_table', 'schedule_search')}.py"
            )
        results[name] = read_json(file)
    sections: list[Section] = [*of_rlhfuse.sections(results), *of_real.sections(results), *of_puzzle.sections()]
    computer = machine()
    facts = (
        f"Commit {git('rev-parse', '--short', 'HEAD')}, {time.strftime('%Y-%m-%d')}, {computer['cpu']}, "
        f"{computer['cores']} cores. Nothing on this page was measured on GPUs: ours are computed, simulated, or "
        "found by search. 'Not at hand' is a value that the paper prints nowhere as a number."
    )
    write_text(out, page(TITLE, facts, sections, MISSING))
    rows = sum(len(section.rows) for section in sections)
    print(f"{out}: {len(sections)} sections, {rows} rows, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    run_program(main)
