"""Show that two runs computed the same: a fused one and a serial one, or a resumed one and an uninterrupted one.

    python tools/compare_runs.py runs/fused runs/serial

Compares metrics.jsonl on every key that must not depend on time or on fusion, and the weights under export/ bit by
bit. Exit code 0: equal, 1: different, 2: bad input.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhfuse.base.errors import run_program
from rlhfuse.run.compare import IGNORED, Comparison, compare_runs


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two run directories: metrics exactly, exports bit by bit.")
    parser.add_argument("run_a", help="run directory (a trainer.output_dir)")
    parser.add_argument("run_b", help="the run directory to compare with")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="differences shown of each kind (default 5)")
    arguments = parser.parse_args()
    comparisons = compare_runs(arguments.run_a, arguments.run_b)
    console = Console(highlight=False)
    console.print(summary_table(comparisons))
    for comparison in comparisons:
        if comparison.differences:
            console.print(difference_table(comparison, arguments.show))
    if len(comparisons) == 1:
        console.print("no export/ in either run: only metrics were compared")
    console.print(f"not compared: {', '.join(f'{prefix}*' for prefix in IGNORED)}")
    equal = not any(comparison.differences for comparison in comparisons)
    console.print("equal" if equal else "different")
    return 0 if equal else 1


def summary_table(comparisons: list[Comparison]) -> Table:
    table = Table("compared", "entries", "different", "largest |a - b|")
    for comparison in comparisons:
        table.add_row(
            comparison.what, str(comparison.entries), str(len(comparison.differences)), repr(comparison.largest)
        )
    return table


def difference_table(comparison: Comparison, show: int) -> Table:
    count = len(comparison.differences)
    table = Table("where", "a", "b", "|a - b|", title=f"{comparison.what}: first {min(show, count)} of {count}")
    for difference in comparison.differences[:show]:
        size = "" if difference.size is None else repr(difference.size)
        table.add_row(escape(difference.where), escape(difference.a), escape(difference.b), size)
    return table


def run() -> None:
    """The installed program."""
    run_program(main)


if __name__ == "__main__":
    run()
