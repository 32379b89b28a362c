"""How the schedule search grows with the instance: from 192 operations to 65,536.

    python benchmarks/schedule_growth.py --ranks 2 --seconds 60 --plot growth.png --out growth.json
    python benchmarks/schedule_growth.py --sizes 8x6,16x64 --seconds 5

An instance NxM has N nodes; both models have N stages and M micro-batches, times as in the last rows of
Table 3: 4NM operations. Each runs in a process of its own, so that its memory is its own. Printed for
each: moves per second, what a tried and what an accepted move costs one rank, makespan beside greedy and
bound, peak memory of the largest process. Making the first schedules counts apart.

Table and progress go to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from collections.abc import Sequence
from typing import Any

from paper.table3 import Setting
from rich.table import Table
from search_runs import Outcome, Run, console, counting, finish, launch, machine, positive

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_bytes
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.rules.builders import greedy

SIZES = "8x6,8x16,16x16,16x64,32x64,32x128,64x128,64x256"


def main() -> None:
    arguments = parse_arguments()
    screen, rows = console(), []
    for nodes, microbatches in sizes(arguments.sizes):
        problem = instance(nodes, microbatches)
        screen.print(f"{nodes} nodes, {microbatches} micro-batches: {4 * nodes * microbatches:,} operations ...")
        run = Run(f"{nodes}x{microbatches}", problem, arguments.seconds, arguments.seed)
        (outcome,) = launch([run], arguments.ranks)
        rows.append(facts(outcome, problem, 4 * nodes * microbatches))
        screen.print(table(rows[-1:]))
    screen.print(table(rows))
    if arguments.plot:
        write_bytes(arguments.plot, draw(rows))
    settings = {key: getattr(arguments, key) for key in ("ranks", "seconds", "seed")}
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    result = {"benchmark": "schedule_growth", "machine": machine(), "ended": started, **settings, "rows": rows}
    finish(result, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of the schedule search over the size of the instance.")
    parser.add_argument("--ranks", type=counting, default=2, help="MPI ranks; 1 runs without mpirun")
    parser.add_argument("--seconds", type=positive, default=60.0, help="for each instance")
    parser.add_argument("--seed", type=counting, default=1)
    parser.add_argument("--sizes", default=SIZES, help="NODESxMICROBATCHES, several with commas")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the cost of a move over the size")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    return parser.parse_args()


def sizes(text: str) -> list[tuple[int, int]]:
    """(nodes, micro-batches) of each instance. Raises InputError on any other text."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", word)
        if not match:
            raise InputError(f"--sizes {text}: {word!r} is not of the form NODESxMICROBATCHES, such as 16x64")
        found.append((int(match[1]), int(match[2])))
    return sorted(found, key=lambda size: size[0] * size[1])


def instance(nodes: int, microbatches: int) -> FusionProblem:
    """One pipeline of each model over all nodes, in opposite directions."""
    return Setting("65B/33B", (nodes, nodes), (microbatches, microbatches), (2, 1), (1.64, 1)).problem()


def facts(outcome: Outcome, problem: FusionProblem, operations: int) -> dict[str, Any]:
    """A row. Costs are of one rank; None where no move was accepted."""
    annealing = outcome.seconds - outcome.setup_seconds
    rank_seconds = annealing * outcome.ranks
    rule = evaluate(greedy(problem))
    return {
        "instance": outcome.name,
        "operations": operations,
        "setup_seconds": outcome.setup_seconds,
        "seconds": outcome.seconds,
        "moves": outcome.moves,
        "accepted": outcome.accepted,
        "moves_per_second_and_rank": outcome.moves / rank_seconds if rank_seconds > 0 else None,
        "tried_move_microseconds": 1e6 * rank_seconds / outcome.moves if outcome.moves else None,
        "accepted_move_microseconds": 1e6 * rank_seconds / outcome.accepted if outcome.accepted else None,
        "makespan": outcome.makespan,
        "greedy": rule.makespan,
        "lower_bound": outcome.lower_bound,
        "bound_seconds": outcome.first_bound_seconds,
        "memory": outcome.peak_memory,
        "greedy_memory": rule.peak_memory,
        "memory_lower_bound": outcome.memory_lower_bound,
        "first_makespan": outcome.improvements[0][1],
        "peak_rss_bytes": max(outcome.peak_rss_bytes),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="Growth of the search")
    titles = ("instance", "operations", "set-up s", "moves/s, rank", "us/tried", "us/accepted")
    for title in (*titles, "makespan", "greedy", "bound", "memory", "RSS GB"):
        made.add_column(title, justify="right")
    for row in rows:
        made.add_row(
            row["instance"],
            f"{row['operations']:,}",
            f"{row['setup_seconds']:.2f}",
            *(
                "-" if row[key] is None else f"{row[key]:,.{digits}f}"
                for key, digits in (
                    ("moves_per_second_and_rank", 0),
                    ("tried_move_microseconds", 3),
                    ("accepted_move_microseconds", 2),
                )
            ),
            *(f"{row[key]:g}" for key in ("makespan", "greedy", "lower_bound", "memory")),
            f"{row['peak_rss_bytes'] / 1e9:.2f}",
        )
    return made


def draw(rows: Sequence[dict[str, Any]]) -> bytes:
    """PNG: cost of a tried and of an accepted move over the number of operations, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log")
    for key, label in (("accepted_move_microseconds", "accepted move"), ("tried_move_microseconds", "tried move")):
        points = [(row["operations"], row[key]) for row in rows if row[key] is not None]
        if points:
            axes.plot(*zip(*points), marker="o", label=label)
            for operations, cost in points:
                axes.annotate(f"{cost:.3g}", (operations, cost), textcoords="offset points", xytext=(0, 6), fontsize=7)
    axes.set_xlabel("operations")
    axes.set_ylabel("microseconds of one rank")
    axes.set_title("Cost of a move of the schedule search")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


if __name__ == "__main__":
    run_program(main)
