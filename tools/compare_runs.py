"""Show that two runs computed the same: a fused one and a serial one, or a resumed one and an uninterrupted one.

    python tools/compare_runs.py runs/fused runs/serial

Compares metrics.jsonl on every key that must not depend on time or on fusion, and the weights under export/ bit by
bit. Exit code 0: equal, 1: different, 2: bad input.
"""

from __future__ import annotations

import argparse
from functools import partial

from program import run_program
from run_comparison import IGNORED, Comparison, compare_runs
from text_table import aligned


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two run directories: metrics exactly, exports bit by bit.")
    parser.add_argument("run_a", help="run directory (a trainer.output_dir)")
    parser.add_argument("run_b", help="the run directory to compare with")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="differences shown of each kind (default 5)")
    arguments = parser.parse_args()
    comparisons = compare_runs(arguments.run_a, arguments.run_b)
    print("\n".join(summary(comparisons)))
    for comparison in comparisons:
        if comparison.differences:
            print("\n".join(differences(comparison, arguments.show)))
    if len(comparisons) == 1:
        print("no export/ in either run: only metrics were compared")
    print(f"not compared: {', '.join(f'{prefix}*' for prefix in IGNORED)}")
    equal = not any(comparison.differences for comparison in comparisons)
    print("equal" if equal else "different")
    return 0 if equal else 1


def summary(comparisons: list[Comparison]) -> list[str]:
    rows = [(c.what, str(c.entries), str(len(c.differences)), repr(c.largest)) for c in comparisons]
    return aligned([("compared", "entries", "different", "largest |a - b|"), *rows], left=(0,))


def differences(comparison: Comparison, show: int) -> list[str]:
    count, shown = len(comparison.differences), comparison.differences[:show]
    rows = [(d.where, d.a, d.b, "" if d.size is None else repr(d.size)) for d in shown]
    return [f"{comparison.what}: first {len(shown)} of {count}", *aligned([("where", "a", "b", "|a - b|"), *rows])]


run = partial(run_program, main)  # the installed program

if __name__ == "__main__":
    run()
