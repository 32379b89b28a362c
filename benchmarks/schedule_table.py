"""The paper's Table 3 with this project's search in it.

    python benchmarks/schedule_table.py --ranks 2 --seconds 60 --seeds 3 --out table.json
    python benchmarks/schedule_table.py --rows 3,12 --seconds 5

For each setting: serial 1F1B, 1F1B+, the paper's greedy, the search and the lower bound, as speed-ups over serial and
in ticks, with the seconds of search until the bound; the peak memories beside the best published ones and
the proved bound. All seconds count from the start of a search.

Tables and progress go to stderr, one JSON object to stdout. With several seeds a figure is the median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from paper.greedy import paper_greedy
from paper.table3 import PRINTED, SETTINGS, TRACED, one_f_one_b_plus_makespan
from rich.console import Group
from rich.live import Live
from rich.table import Table
from search_runs import Outcome, Run, console, counting, finish, launch, machine, middle, positive, worst

from rlhfuse.errors import InputError, run_program
from rlhfuse.schedule.ir.evaluate import TOLERANCE, evaluate
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory

SOON_SECONDS = 2.0


def main() -> None:
    arguments = parse_arguments()
    rows = row_numbers(arguments.rows)
    runs = planned(rows, arguments)
    screen = console()
    outcomes: list[Outcome] = []
    with Live(picture([], runs, 0), console=screen, refresh_per_second=1) as live:
        for outcome in launch(runs, arguments.ranks):
            outcomes.append(outcome)
            screen.print(f"{len(outcomes):3d}/{len(runs)}  {progress(outcome)}")
            done = [row for row in rows if all(run.name != str(row) for run in runs[len(outcomes) :])]
            live.update(picture([row_facts(row, outcomes) for row in done], runs, len(outcomes)))
    facts = [row_facts(row, outcomes) for row in rows]
    screen.print("\n" + ", ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in summary(facts).items()))
    settings = {key: getattr(arguments, key) for key in ("ranks", "seconds", "seeds")}
    finish(
        {
            "benchmark": "schedule_table",
            "machine": machine(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
            **settings,
            "summary": summary(facts),
            "rows": facts,
        },
        arguments.out,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The paper's Table 3, searched here.")
    parser.add_argument("--ranks", type=counting, default=2, help="MPI ranks; 1 runs without mpirun")
    parser.add_argument("--seconds", type=positive, default=60.0, help="for one search of one setting")
    parser.add_argument("--rows", default="all", help="rows of the table to run, such as 1,2,12")
    parser.add_argument("--seeds", type=counting, default=1, help="searches of each setting, with seeds 1, 2, ...")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    return parser.parse_args()


def row_numbers(text: str) -> list[int]:
    """Rows counted from 1. Raises InputError on any other text."""
    if text == "all":
        return list(range(1, len(SETTINGS) + 1))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isdigit() and 1 <= int(word) <= len(SETTINGS)):
            raise InputError(f"--rows {text}: {word!r} is not a row; give numbers from 1 to {len(SETTINGS)}, or all")
    return sorted({int(word) for word in words})


def planned(rows: Sequence[int], arguments: argparse.Namespace) -> list[Run]:
    """Row by row and seed by seed."""
    seeds = range(1, arguments.seeds + 1)
    return [Run(str(row), SETTINGS[row - 1].problem(), arguments.seconds, seed) for row in rows for seed in seeds]


def progress(outcome: Outcome) -> str:
    reached = outcome.first_bound_seconds
    bound = f"bound after {reached:.2f} s" if reached is not None else f"bound {outcome.lower_bound} not reached"
    return (
        f"{SETTINGS[int(outcome.name) - 1].name:10s} seed {outcome.seed}: "
        f"makespan {outcome.makespan}, {bound}, memory {outcome.peak_memory}, {outcome.seconds:.1f} s"
    )


def row_facts(row: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything about one row of the table, as it goes into the JSON object."""
    setting, printed, traced = SETTINGS[row - 1], PRINTED[row - 1], TRACED[row - 1]
    problem = setting.problem()
    rule = evaluate(paper_greedy(problem))
    ours = [outcome for outcome in outcomes if outcome.name == str(row)]
    peak = middle([outcome.peak_memory for outcome in ours])
    bound = middle([outcome.memory_lower_bound for outcome in ours])
    return {
        "row": row,
        "setting": setting.name,
        "models": setting.models,
        "serial": serial_makespan(problem),
        "one_f_one_b_plus": one_f_one_b_plus_makespan(setting),
        "greedy": rule.makespan,
        "makespan": middle([outcome.makespan for outcome in ours]),
        "makespan_worst": worst([outcome.makespan for outcome in ours]),
        "lower_bound": ours[0].lower_bound,
        "bound_seconds": middle([outcome.first_bound_seconds for outcome in ours]),
        "bound_seconds_worst": worst([outcome.first_bound_seconds for outcome in ours]),
        "serial_memory": serial_peak_memory(problem),
        "greedy_memory": rule.peak_memory,
        "memory": peak,
        "memory_worst": worst([outcome.peak_memory for outcome in ours]),
        "memory_lower_bound": bound,
        "memory_gap": peak / bound - 1,
        "published": {"printed": printed._asdict(), "traced": traced._asdict()},
        "runs": [run_facts(outcome) for outcome in ours],
    }


def run_facts(outcome: Outcome) -> dict[str, Any]:
    keys = ("seed", "makespan", "peak_memory", "first_bound_seconds", "seconds", "setup_seconds", "moves", "accepted")
    return {key: getattr(outcome, key) for key in keys} | {"improvements": outcome.improvements}


def summary(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows meet what is asked of the search; medians over seeds, and worst seeds."""
    published = [row["published"]["traced"]["ours_memory"] * (1 + TOLERANCE) for row in facts]
    strictly = [row["published"]["traced"]["ours_memory"] * (1 - TOLERANCE) for row in facts]
    soon = [row for row in facts if row["bound_seconds"] is not None and row["bound_seconds"] <= SOON_SECONDS]
    return {
        "rows": len(facts),
        "latency_at_bound": sum(row["makespan"] <= row["lower_bound"] for row in facts),
        "latency_at_bound_worst_seed": sum(row["makespan_worst"] <= row["lower_bound"] for row in facts),
        "bound_within_2_seconds": len(soon),
        "memory_at_most_published": sum(row["memory"] <= best for row, best in zip(facts, published)),
        "memory_at_most_published_worst_seed": sum(row["memory_worst"] <= best for row, best in zip(facts, published)),
        "memory_below_published": sum(row["memory"] < best for row, best in zip(facts, strictly)),
        "memory_proved_least": sum(row["memory"] <= row["memory_lower_bound"] * (1 + TOLERANCE) for row in facts),
    }


def picture(facts: Sequence[dict[str, Any]], runs: Sequence[Run], done: int) -> Group:
    """The tables of the rows that are through, and what runs now."""
    parts: list[Any] = [latency_table(facts), memory_table(facts)] if facts else []
    if done < len(runs):
        run, left = runs[done], sum(run.seconds for run in runs[done:])
        name = SETTINGS[int(run.name) - 1].name
        parts.append(f"search {done + 1} of {len(runs)}: {name}, seed {run.seed}; {left:.0f} s at most")
    return Group(*parts)


def latency_table(facts: Sequence[dict[str, Any]]) -> Table:
    table = _table("Latency: speed-up over serial 1F1B (ticks)", "serial", "1F1B+", "greedy", "ours", "bound")
    for name in ("published ours", "s to bound", "worst seed"):
        table.add_column(name, justify="right")
    for row in facts:
        keys = ("serial", "one_f_one_b_plus", "greedy", "makespan", "lower_bound")
        cells = [f"{row['serial'] / row[key]:.2f} ({row[key]})" for key in keys]
        printed, traced = row["published"]["printed"], row["published"]["traced"]
        cells.append(f"{printed['ours']:.2f} ({traced['ours']})")
        table.add_row(row["setting"], *cells, number(row["bound_seconds"]), number(row["bound_seconds_worst"]))
    return table


def memory_table(facts: Sequence[dict[str, Any]]) -> Table:
    table = _table("Peak activation memory", "greedy", "published", "ours", "worst seed", "serial", "bound", "gap")
    for row in facts:
        keys = ("memory", "memory_worst", "serial_memory", "memory_lower_bound")
        published = row["published"]["traced"]["ours_memory"]
        values = [row["greedy_memory"], published, *(row[key] for key in keys)]
        table.add_row(row["setting"], *(f"{value:.2f}" for value in values), f"{row['memory_gap']:.1%}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column("PP0/PP1 xM0")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def number(value: float | None) -> str:
    """Four digits, or a dash for what was not reached."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_program(main)
