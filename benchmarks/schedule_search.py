"""The schedule search on the settings of the paper's Table 3, over the size of the instance, and over many seeds.

    python benchmarks/schedule_search.py table --ranks 2 --seconds 60        speed-ups, memory, time to the bound
    python benchmarks/schedule_search.py growth --ranks 2 --plot growth.png  from 192 operations to 65,536
    python benchmarks/schedule_search.py seeds --ranks 2 --seconds 30        median and worst of twenty seeds

`growth`: an instance NxM has N nodes; both models have N stages and M micro-batches, times as in the last rows of
Table 3. Seconds count from the start of a search, which the schedules made by rule are part of; moves are made before
the first search, so that none pays for loading kernels. A bound never reached counts as later than all others.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Figure, Measurement, Panel, counting, options, plot, positive
from paper.table3 import LARGER, PRINTED, SETTINGS, TRACED, Setting, one_f_one_b_plus_makespan
from processes import mpirun, run

from rlhfuse.errors import InputError, run_program
from rlhfuse.schedule.ir.evaluate import TOLERANCE, evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import greedy, serial_makespan, serial_peak_memory
from rlhfuse.schedule.search.mpi import world_communicator
from rlhfuse.schedule.search.search import SearchObserver, SearchReport, SearchSettings, search

SIZES = "8x6,8x16,16x16,16x64,32x64,32x128,64x128,64x256"
SEED_ROWS = "2,8,12"  # the two where memory is hardest, and the largest
SOON_SECONDS = 2.0
GROWTH_BYTES = 2e9


REPORTED = ("makespan", "lower_bound", "peak_memory", "memory_lower_bound", "moves", "accepted", "first_bound_seconds")


@dataclass(frozen=True)
class Outcome:
    """What came of one search; `name` is that of its setting."""

    name: str
    seed: int
    rank_seconds: float  # of all ranks together, spent on moves
    setup_seconds: float  # until the first schedule stood: no move was tried before
    peak_rss_bytes: int  # the largest of a rank
    makespan: Number
    lower_bound: Number
    peak_memory: Number
    memory_lower_bound: Number
    moves: int
    accepted: int
    first_bound_seconds: float | None

    def __str__(self) -> str:
        reached = self.first_bound_seconds
        bound = f"bound after {reached:.2f} s" if reached is not None else f"bound {self.lower_bound} not reached"
        return f"{self.name:10s} seed {self.seed}: makespan {self.makespan}, {bound}, memory {self.peak_memory}"


def main() -> None:
    arguments = parse_arguments()
    measurement = Measurement(f"schedule_{arguments.command}", arguments)
    measurement.facts(ranks=arguments.ranks, seconds_of_a_search=arguments.seconds)
    COMMANDS[arguments.command](arguments, measurement)
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, seed=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--ranks", type=counting, default=2, help="MPI ranks; 1 runs without mpirun")
    parser.add_argument("--seconds", type=positive, default=60.0, help="for one search [%(default)s]")
    parser.add_argument("--seeds", type=counting, help="seeds 1, 2, ... for each setting [1; seeds: 20]")
    parser.add_argument("--rows", help=f"table, seeds: rows of Table 3, such as 1,2,12 [all; seeds: {SEED_ROWS}]")
    parser.add_argument("--sizes", default=SIZES, help="growth: NODESxMICROBATCHES, several with commas")
    parser.add_argument("--plot", metavar="FILE.png", help="growth: draw the cost of a move over the size")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.sizes, arguments.rows = 0.5, "4x4,8x6", arguments.rows or "1,4"
    seeds = arguments.command == "seeds"
    arguments.seeds = arguments.seeds or (20 if seeds and not arguments.quick else 3 if seeds else 1)
    arguments.rows = row_numbers(arguments.rows or (SEED_ROWS if seeds else "all"))
    arguments.sizes = sizes(arguments.sizes)
    return arguments


def row_numbers(text: str) -> list[int]:
    """Rows counted from 1. Raises InputError on any other text."""
    words = [word.strip() for word in text.split(",")] if text != "all" else map(str, range(1, len(SETTINGS) + 1))
    rows = set()
    for word in words:
        if not (word.isdigit() and 1 <= int(word) <= len(SETTINGS)):
            raise InputError(f"--rows {text}: {word!r} is not a row; give numbers from 1 to {len(SETTINGS)}, or all")
        rows.add(int(word))
    return sorted(rows)


def sizes(text: str) -> list[tuple[int, int]]:
    """(nodes, micro-batches) of each instance, smallest first. Raises InputError on any other text."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", word)
        if not match:
            raise InputError(f"--sizes {text}: {word!r} is not of the form NODESxMICROBATCHES, such as 16x64")
        found.append((int(match[1]), int(match[2])))
    return sorted(found, key=lambda size: size[0] * size[1])


# Table 3 and seeds ------------------------------------------------------------------------------------------------


def by_setting(arguments: argparse.Namespace, measurement: Measurement) -> Iterator[tuple[int, list[Outcome]]]:
    """Every row of Table 3 that is asked for, with an outcome for each seed."""
    rows, seeds = arguments.rows, range(1, arguments.seeds + 1)
    settings = [(SETTINGS[row - 1].name, SETTINGS[row - 1].problem(), seed) for row in rows for seed in seeds]
    outcomes = launch(settings, arguments, measurement)
    for number, row in enumerate(rows):
        yield row, outcomes[number * len(seeds) : (number + 1) * len(seeds)]


def table(arguments: argparse.Namespace, measurement: Measurement) -> None:
    """Speed-ups over serial 1F1B and peak memory beside what the paper and its repository publish."""
    rows = [row_facts(row, outcomes) for row, outcomes in by_setting(arguments, measurement)]
    latency, memory = [], []
    for row in rows:
        makespans = [row[key] for key in ("serial", "one_f_one_b_plus", "greedy", "makespan", "lower_bound")]
        cells = [f"{row['serial'] / makespan:.2f} ({makespan})" for makespan in makespans]
        printed, traced = row["printed"], row["traced"]
        published = f"{printed['ours']:.2f} ({traced['ours']})"
        latency.append([row["setting"], *cells, published, text(row["seconds"]), text(row["seconds_worst"])])
        values = [row[key] for key in ("greedy_memory", "memory", "memory_worst", "serial_memory", "memory_bound")]
        values.insert(1, traced["ours_memory"])
        gap = row["memory"] / row["memory_bound"] - 1
        memory.append([row["setting"], *(f"{value:.2f}" for value in values), f"{gap:.1%}"])
    head = ("PP0/PP1 xM0", "serial", "1F1B+", "greedy", "ours", "bound", "published ours", "s to bound", "worst seed")
    measurement.table("latency", "Latency: speed-up over serial 1F1B (ticks)", head, latency)
    head = ("PP0/PP1 xM0", "greedy", "published", "ours", "worst seed", "serial", "bound", "gap")
    measurement.table("memory", "Peak activation memory", head, memory)
    published = [row["traced"]["ours_memory"] for row in rows]
    soon = [row for row in rows if row["seconds"] is not None and row["seconds"] <= SOON_SECONDS]
    counts = {
        "rows": len(rows),
        "at_bound": sum(row["makespan"] <= row["lower_bound"] for row in rows),
        "at_bound_soon": len(soon),
        "memory_at_most_published": sum(r["memory"] <= p * (1 + TOLERANCE) for r, p in zip(rows, published)),
        "memory_below_published": sum(r["memory"] < p * (1 - TOLERANCE) for r, p in zip(rows, published)),
        "memory_proved_least": sum(row["memory"] <= row["memory_bound"] * (1 + TOLERANCE) for row in rows),
    }
    goals = {"at_bound": 12, "at_bound_soon": 9, "memory_at_most_published": 12, "memory_below_published": 7}
    for name, count in counts.items():
        figure = Figure(count, "settings")
        measurement.figure(name, figure.at_least(goals[name]) if name in goals else figure)
    if (slowest := worst([row["seconds"] for row in rows])) is not None:
        measurement.figure("slowest_to_bound", slowest, "s")
    measurement.facts(rows=rows)


def row_facts(row: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One row of Table 3; with several seeds a value is the median."""
    setting = SETTINGS[row - 1]
    problem, traced = setting.problem(), TRACED[row - 1]
    return {
        "row": row,
        "setting": setting.name,
        "models": setting.models,
        "serial": serial_makespan(problem),
        "one_f_one_b_plus": one_f_one_b_plus_makespan(setting),
        "greedy": traced.greedy,  # as the authors' program makes it
        "makespan": middle([outcome.makespan for outcome in outcomes]),
        "lower_bound": outcomes[0].lower_bound,
        "seconds": middle([outcome.first_bound_seconds for outcome in outcomes]),
        "seconds_worst": worst([outcome.first_bound_seconds for outcome in outcomes]),
        "serial_memory": serial_peak_memory(problem),
        "greedy_memory": traced.greedy_memory,
        "memory": middle([outcome.peak_memory for outcome in outcomes]),
        "memory_worst": worst([outcome.peak_memory for outcome in outcomes]),
        "memory_bound": middle([outcome.memory_lower_bound for outcome in outcomes]),
        "printed": PRINTED[row - 1]._asdict(),
        "traced": traced._asdict(),
        "searches": [asdict(outcome) for outcome in outcomes],
    }


def seeds(arguments: argparse.Namespace, measurement: Measurement) -> None:
    """Median and worst of many seeds of a few settings, and every seed's own."""
    rows, facts = [], []
    for row, outcomes in by_setting(arguments, measurement):
        values = {
            key: [getattr(outcome, key) for outcome in outcomes]
            for key in ("first_bound_seconds", "makespan", "peak_memory")
        }
        seconds, makespan, memory = (f"{text(middle(each))} / {text(worst(each))}" for each in values.values())
        reached = sum(value is not None for value in values["first_bound_seconds"])
        published, bound = TRACED[row - 1], str(outcomes[0].lower_bound)
        name = SETTINGS[row - 1].name
        ours = [f"{reached} of {len(outcomes)}", seconds, makespan, bound, str(published.ours)]
        rows.append([name, *ours, memory, str(published.ours_memory)])
        facts.append({"setting": name, **values})
        measurement.figure(f"row{row}.at_bound", reached, "seeds")
    head = ("PP0/PP1 xM0", "at bound", "s to bound", "makespan", "bound", "published", "memory", "published")
    measurement.table("seeds", f"{arguments.seeds} seeds: median / worst", head, rows)
    measurement.facts(rows=facts)


# growth -----------------------------------------------------------------------------------------------------------


def growth(arguments: argparse.Namespace, measurement: Measurement) -> None:
    """What a tried and an accepted move cost one rank, and what is reached, over the number of operations."""
    rows, facts = [], []
    for nodes, microbatches in arguments.sizes:
        name, operations = f"{nodes}x{microbatches}", 4 * nodes * microbatches
        problem = Setting(LARGER, (nodes, nodes), (microbatches, microbatches), (2, 1), (1.64, 1)).problem()
        # one launch each, so that its memory is its own
        (outcome,) = launch([(name, problem, 1)], arguments, measurement)
        rule = evaluate(greedy(problem))
        tried, accepted = (
            1e6 * outcome.rank_seconds / count if count else None for count in (outcome.moves, outcome.accepted)
        )
        facts.append({"operations": operations, "tried": tried, "accepted": accepted, "greedy": rule.makespan})
        facts[-1] |= asdict(outcome)
        ends = [f"{value:g}" for value in (outcome.makespan, rule.makespan, outcome.lower_bound, outcome.peak_memory)]
        rss = outcome.peak_rss_bytes
        costs = [f"{outcome.setup_seconds:.2f}", text(tried), text(accepted)]
        rows.append([name, f"{operations:,}", *costs, *ends, f"{rss / 1e9:.2f}"])
        measurement.figure(f"{name}.accepted_move", accepted or 0.0, "us")
        measurement.figure(f"{name}.over_greedy", outcome.makespan / rule.makespan)
        measurement.figure(f"{name}.rss", Figure(rss, "bytes").at_most(GROWTH_BYTES))
    head = ("instance", "operations", "set-up s", "us/tried", "us/accepted", "makespan", "greedy", "bound", "memory")
    measurement.table("growth", "Growth of the search", (*head, "RSS GB"), rows)
    measurement.facts(rows=facts)
    if arguments.plot:
        lines = {
            f"{key} move": [(fact["operations"], fact[key]) for fact in facts if fact[key]]
            for key in ("tried", "accepted")
        }
        plot(arguments.plot, [Panel("operations", "microseconds of one rank", lines)])


# searches ---------------------------------------------------------------------------------------------------------


def launch(
    settings: Sequence[tuple[str, FusionProblem, int]], arguments: argparse.Namespace, measurement: Measurement
) -> list[Outcome]:
    """Search (name, problem, seed) one after the other under one mpirun; each outcome is said when it is there.

    Raises InputError when there is no mpirun, RuntimeError when the ranks fail.
    """
    ranks, seconds, outcomes = arguments.ranks, arguments.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "searches.json", Path(folder) / "outcomes.jsonl"
        asked.write_text(json.dumps([(name, problem.to_dict(), seconds, seed) for name, problem, seed in settings]))
        answers.touch()
        with answers.open() as lines:

            def watch(_: Any) -> None:
                for line in lines:
                    outcomes.append(Outcome(**json.loads(line)))
                    measurement.say(f"{len(outcomes):3d}/{len(settings)}  {outcomes[-1]}")

            program = [sys.executable, __file__, "--rank", asked, answers, str(ranks)]
            run([*mpirun(ranks), *program], timeout=2 * seconds * len(settings) + 600, watch=watch)
    return outcomes


def rank_main(asked: Path, answers: Path, ranks: int) -> None:
    """The program of a rank: one JSON line for each search, written by rank 0."""
    comm = world_communicator() if ranks > 1 else None
    search(SETTINGS[0].problem(), SearchSettings(iterations=1000, objective="memory"), comm=comm)
    for name, raw, seconds, seed in json.loads(asked.read_text()):
        observer = FirstSchedule()
        settings = SearchSettings(time_limit=seconds, seed=seed, objective="memory")
        _, report = search(FusionProblem.from_dict(raw), settings, comm=comm, observer=observer)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        facts = {
            "name": name,
            "seed": seed,
            "rank_seconds": (report.seconds - observer.seconds) * ranks,
            "setup_seconds": observer.seconds,
            "peak_rss_bytes": max(comm.allgather(rss)) if comm is not None else rss,
            **{key: getattr(report, key) for key in REPORTED},
        }
        if comm is None or comm.Get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps(facts) + "\n")


class FirstSchedule(SearchObserver):
    """When the first schedule stood, which is made by rule."""

    seconds = 0.0

    def improved(self, schedule: Schedule, report: SearchReport) -> None:
        self.seconds = self.seconds or report.seconds


def middle(values: Sequence[Number | None]) -> Any:
    """The median, of two middle ones the larger; None (never reached) counts as the largest."""
    return sorted(values, key=lambda value: (value is None, value or 0))[len(values) // 2]


def worst(values: Sequence[Number | None]) -> Any:
    """The largest; None (never reached) counts as larger."""
    return None if None in values else max(value for value in values if value is not None)


def text(value: Number | None) -> str:
    """Four digits, or a dash for what was not reached."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


COMMANDS = {"table": table, "growth": growth, "seeds": seeds}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        run_program(main)
