"""How much the schedule search depends on luck: many seeds on a few settings of Table 3.

    python benchmarks/schedule_seeds.py --ranks 2 --seconds 30 --seeds 20 --out seeds.json

For each setting the median and the worst seed of: seconds until the latency bound, makespan and peak
memory at the end. A seed that never reached the bound counts as later than all others.

Table and progress go to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from paper.table3 import SETTINGS, TRACED
from rich.table import Table
from schedule_table import number, progress, row_numbers
from search_runs import Outcome, Run, console, counting, finish, launch, machine, middle, positive, worst

from rlhfuse.errors import run_program

ROWS = "2,8,12"  # the two where memory is hardest, and the largest


def main() -> None:
    arguments = parse_arguments()
    screen = console()
    runs = [
        Run(str(row), SETTINGS[row - 1].problem(), arguments.seconds, seed)
        for row in row_numbers(arguments.rows)
        for seed in range(1, arguments.seeds + 1)
    ]
    screen.print(f"{len(runs)} searches, at most {sum(run.seconds for run in runs):.0f} s on {arguments.ranks} ranks")
    outcomes: list[Outcome] = []
    for outcome in launch(runs, arguments.ranks):
        outcomes.append(outcome)
        screen.print(f"{len(outcomes):3d}/{len(runs)}  {progress(outcome)}")
        if len(outcomes) % arguments.seeds == 0:
            screen.print(table([facts(outcomes[-arguments.seeds :])]))
    rows = [facts(outcomes[i : i + arguments.seeds]) for i in range(0, len(outcomes), arguments.seeds)]
    screen.print(table(rows))
    settings = {key: getattr(arguments, key) for key in ("ranks", "seconds", "seeds")}
    ended = time.strftime("%Y-%m-%dT%H:%M:%S")
    result = {"benchmark": "schedule_seeds", "machine": machine(), "ended": ended, **settings, "rows": rows}
    finish(result, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Median and worst of many seeds of the schedule search.")
    parser.add_argument("--ranks", type=counting, default=2, help="MPI ranks; 1 runs without mpirun")
    parser.add_argument("--seconds", type=positive, default=30.0, help="for each search")
    parser.add_argument("--seeds", type=counting, default=20, help="seeds 1, 2, ... for each setting")
    parser.add_argument("--rows", default=ROWS, help="rows of Table 3, such as 2,8,12")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    return parser.parse_args()


def facts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A setting over its seeds; every seed's figures stand in `seeds`."""
    row = int(outcomes[0].name)
    keys = ("first_bound_seconds", "makespan", "peak_memory")
    return {
        "row": row,
        "setting": SETTINGS[row - 1].name,
        "lower_bound": outcomes[0].lower_bound,
        "published_makespan": TRACED[row - 1].ours,
        "published_memory": TRACED[row - 1].ours_memory,
        "at_bound": sum(outcome.first_bound_seconds is not None for outcome in outcomes),
        "median": {key: middle([getattr(outcome, key) for outcome in outcomes]) for key in keys},
        "worst": {key: worst([getattr(outcome, key) for outcome in outcomes]) for key in keys},
        "seeds": [{"seed": outcome.seed, **{key: getattr(outcome, key) for key in keys}} for outcome in outcomes],
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="Seeds: median / worst")
    for title in ("PP0/PP1 xM0", "at bound", "s to bound", "makespan", "bound", "published", "memory", "published"):
        made.add_column(title, justify="right")
    for row in rows:
        bound_seconds, makespan, memory = (
            f"{number(row['median'][key])} / {number(row['worst'][key])}"
            for key in ("first_bound_seconds", "makespan", "peak_memory")
        )
        made.add_row(
            row["setting"],
            f"{row['at_bound']} of {len(row['seeds'])}",
            bound_seconds,
            makespan,
            str(row["lower_bound"]),
            str(row["published_makespan"]),
            memory,
            str(row["published_memory"]),
        )
    return made


if __name__ == "__main__":
    run_program(main)
