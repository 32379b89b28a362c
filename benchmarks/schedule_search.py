"""The schedule search on the settings of the paper's Table 3, and over many seeds.

    python benchmarks/schedule_search.py table --ranks 2 --seconds 60        speed-ups, memory, time to the bound
    python benchmarks/schedule_search.py seeds --ranks 2 --seconds 20        ten seeds each, to the published memory
    python benchmarks/schedule_search.py curve --ranks 2 --seconds 10        memory over latency, split and whole

Seconds count from the start of a search, which the schedules made by rule are part of; moves are made before the first
search, so that none pays for loading kernels. A bound never reached counts as later than all others.

`curve`: the least memory at the latency bound, then with more and more slack until serial 1F1B needs no less. Split:
half of every backward is its weight gradient; "freed" releases half of the activation after the first half.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import Figure, Measurement, counting, options
from paper.table3 import PRINTED, SETTINGS, TRACED, one_f_one_b_plus_makespan
from processes import mpirun, run

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import TOLERANCE, tidy
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory
from rlhfuse.schedule.search.mpi import load_mpi
from rlhfuse.schedule.search.search import SearchObserver, SearchReport, SearchSettings, search
from rlhfuse.tools.program import run_program

SOON_SECONDS = 2.0
GOALS = {  # settings of Table 3
    "at_bound": 12,
    "at_bound_soon": 9,
    "memory_at_most_published": 12,
    "memory_below_published": 7,
    "memory_proved_least": 0,
}
SLACKS = (0.0, 0.02, 0.05, 0.1, 0.2)  # of a curve, over the latency bound

REPORTED = ("makespan", "lower_bound", "peak_memory", "memory_lower_bound", "moves", "accepted", "first_bound_seconds")


@dataclass(frozen=True)
class Outcome:
    """What came of one search; `name` is that of its setting."""

    name: str
    seed: int
    rank_seconds: float  # of all ranks together, spent on moves
    makespan: Number
    lower_bound: Number
    peak_memory: Number
    memory_lower_bound: Number
    moves: int
    accepted: int
    first_bound_seconds: float | None

    def as_lean(self, memory: Number) -> bool:
        """Whether it is at the latency bound with no more memory."""
        return self.first_bound_seconds is not None and self.peak_memory <= memory * (1 + TOLERANCE)

    def __str__(self) -> str:
        reached = self.first_bound_seconds
        bound = f"bound after {reached:.2f} s" if reached is not None else f"bound {self.lower_bound} not reached"
        return f"{self.name:10s} seed {self.seed}: makespan {self.makespan}, {bound}, memory {self.peak_memory}"


def main() -> None:
    arguments = parse_arguments()
    measurement = Measurement(f"schedule_{arguments.command}", arguments)
    measurement.facts(ranks=arguments.ranks, seconds_of_a_search=arguments.seconds)
    COMMANDS[arguments.command](measurement)
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, seed=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--ranks", type=counting, default=2, help="MPI ranks; 1 runs without mpirun")
    parser.add_argument("--seconds", type=counting, default=60, help="for one search [%(default)s]")
    parser.add_argument("--seeds", type=counting, help="seeds 1, 2, ... for each setting [1; seeds: 10]")
    parser.add_argument("--rows", help="of Table 3, such as 1,2,12 [all]")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.rows = 0.5, arguments.rows or "1,4"
    several = 2 if arguments.quick else 10
    arguments.seeds = arguments.seeds or (several if arguments.command == "seeds" else 1)
    arguments.rows = row_numbers(arguments.rows or "all")
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


# Table 3 and seeds ------------------------------------------------------------------------------------------------


def table(measurement: Measurement) -> None:
    """Speed-ups over serial 1F1B and peak memory beside what the paper and its repository publish; medians of seeds."""
    rows, seeds = measurement.arguments.rows, range(1, measurement.arguments.seeds + 1)
    settings = [SETTINGS[row - 1] for row in rows]
    outcomes = launch([Search(one.name, one.problem(), seed) for one in settings for seed in seeds], measurement)
    latency, memory, facts, counts = [], [], [], dict.fromkeys(GOALS, 0)
    for number, row in enumerate(rows):
        setting, printed, traced = SETTINGS[row - 1], PRINTED[row - 1], TRACED[row - 1]
        own = outcomes[number * len(seeds) : (number + 1) * len(seeds)]
        each = {key: [getattr(outcome, key) for outcome in own] for key in REPORTED}
        makespan, peak, seconds = (each[key] for key in ("makespan", "peak_memory", "first_bound_seconds"))
        serial, bound = serial_makespan(setting.problem()), own[0].lower_bound
        rules = serial, one_f_one_b_plus_makespan(setting), traced.greedy  # the last as the authors' program makes it
        cells = [f"{serial / ticks:.2f} ({ticks})" for ticks in (*rules, middle(makespan), worst(makespan), bound)]
        reached = sum(value is not None for value in seconds)
        ends = [f"{printed.ours:.2f} ({traced.ours})", f"{reached} of {len(own)}", text(middle(seconds))]
        latency.append([setting.name, *cells, *ends, text(worst(seconds))])
        least, held = middle(each["memory_lower_bound"]), middle(peak)
        values = (
            traced.greedy_memory,
            traced.ours_memory,
            held,
            worst(peak),
            serial_peak_memory(setting.problem()),
            least,
        )
        memory.append([setting.name, *(f"{value:.2f}" for value in values), f"{held / least - 1:.1%}"])
        counts["at_bound"] += middle(makespan) <= bound
        counts["at_bound_soon"] += (middle(seconds) or SOON_SECONDS + 1) <= SOON_SECONDS
        counts["memory_at_most_published"] += held <= traced.ours_memory * (1 + TOLERANCE)
        counts["memory_below_published"] += held < traced.ours_memory * (1 - TOLERANCE)
        counts["memory_proved_least"] += held <= least * (1 + TOLERANCE)
        facts.append({"row": row, "setting": setting.name, **each})
        measurement.figure(f"row{row}.at_bound", reached, "seeds")
        if middle(seconds) is not None:
            measurement.figure(
                f"row{row}.seconds", Figure(middle(seconds), "s", min(filter(None, seconds)), worst(seconds))
            )
    head = ("PP0/PP1 xM0", "serial", "1F1B+", "greedy", "ours", "worst seed", "bound", "published ours", "at bound")
    measurement.table(
        "latency", "Latency: speed-up over serial 1F1B (ticks)", (*head, "after s", "worst seed"), latency
    )
    head = ("PP0/PP1 xM0", "greedy", "published", "ours", "worst seed", "serial", "bound", "gap")
    measurement.table("memory", "Peak activation memory", head, memory)
    for name, count in counts.items():
        figure = Figure(count, f"of {len(settings)}")
        measurement.figure(name, figure.at_least(GOALS[name]) if len(settings) == len(SETTINGS) else figure)
    measurement.facts(rows=facts)


def seeds(measurement: Measurement) -> None:
    """How many seeds come to the published peak memory at the latency bound, and after how long."""
    rows, number = measurement.arguments.rows, measurement.arguments.seeds
    wanted = {SETTINGS[row - 1].name: TRACED[row - 1].ours_memory for row in rows}
    outcomes = launch(
        [
            Search(SETTINGS[row - 1].name, SETTINGS[row - 1].problem(), seed, until=TRACED[row - 1].ours_memory)
            for row in rows
            for seed in range(1, number + 1)
        ],
        measurement,
    )
    lines, facts = [], []
    for name, published in wanted.items():
        own = [outcome for outcome in outcomes if outcome.name == name]
        there = [outcome for outcome in own if outcome.as_lean(published)]
        after = [outcome.rank_seconds / measurement.arguments.ranks if outcome in there else None for outcome in own]
        figure = Figure(len(there), f"of {number} seeds")
        measurement.figure(f"{name.replace(' ', '.')}.as_published", figure.at_least(0.9 * number))
        cells = f"{published:.2f}", f"{max(outcome.peak_memory for outcome in own):.2f}", f"{len(there)} of {number}"
        lines.append([name, *cells, text(middle(after)), text(worst(after))])
        facts.append({"setting": name, "seconds": after, "peak_memory": [outcome.peak_memory for outcome in own]})
    head = ("PP0/PP1 xM0", "published", "worst seed", "as published", "after s", "worst seed")
    measurement.table("seeds", "Peak memory at the latency bound, over seeds", head, lines)
    measurement.facts(rows=facts)


# memory over latency ----------------------------------------------------------------------------------------------


def curve(measurement: Measurement) -> None:
    """Peak memory at the bound and at some slack, of whole and of split backwards, relative to serial 1F1B."""
    searches, rows = [], []
    for setting in (SETTINGS[row - 1] for row in measurement.arguments.rows):
        whole = setting.problem()
        enough = serial_peak_memory(whole)
        for way, problem in (("whole", whole), ("split", halved(whole, 1)), ("freed", halved(whole, 0.5))):
            bound = latency_bound(problem)
            for slack in SLACKS:
                latency = bound * (1 + slack) if slack else None
                searches.append(Search(f"{setting.name} {way}", problem, latency=latency, enough=enough))
    outcomes = launch(searches, measurement)
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        problem, enough = next((search.problem, search.enough) for search in searches if search.name == name)
        points = [outcome for outcome in outcomes if outcome.name == name]
        cells = [f"{point.makespan:g}: {point.peak_memory:g}" for point in points]
        bound = points[0].lower_bound
        least = f"{points[0].memory_lower_bound:g}"
        rows.append([name, f"{bound:g}", least, *cells, *[""] * (len(SLACKS) - len(cells)), f"{enough:g}"])
        figure = name.replace(" ", ".")
        measurement.figure(f"{figure}.memory", Figure(points[0].peak_memory / enough, "of serial 1F1B's"))
        measurement.figure(f"{figure}.makespan", Figure(points[0].makespan / bound, "of the bound"))
    slacks = [f"+{slack:.0%}" if slack else "fastest" for slack in SLACKS]
    head = ("setting", "bound", "memory bound", *slacks, "serial memory")
    measurement.table("curve", "Makespan: least peak memory found", head, rows)
    measurement.facts(points=[asdict(outcome) for outcome in outcomes])


def halved(problem: FusionProblem, kept: float) -> FusionProblem:
    """Half of every backward as its weight gradient, which needs this share of the activation."""

    def half(pipeline: Pipeline) -> Pipeline:
        times = tuple(tidy(time / 2) for time in pipeline.backward)
        needed = tuple(tidy(kept * activation) for activation in pipeline.activation)
        return replace(pipeline, backward=times, weight_gradient=times, weight_activation=needed)

    return replace(problem, pipelines=tuple(map(half, problem.pipelines)))


# searches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """One search to make; `latency` is fast enough; left out if the one before it of this name has `enough` memory."""

    name: str
    problem: FusionProblem
    seed: int = 1
    latency: Number | None = None
    enough: Number | None = None
    until: Number | None = None  # ends at a schedule at the latency bound with no more memory


def launch(searches: Sequence[Search], measurement: Measurement) -> list[Outcome]:
    """Make the searches one after the other under one mpirun; each outcome is said when it is there.

    Raises InputError when there is no mpirun, RuntimeError when the ranks fail.
    """
    ranks, seconds, outcomes = measurement.arguments.ranks, measurement.arguments.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "searches.json", Path(folder) / "outcomes.jsonl"
        asked.write_text(json.dumps([vars(one) | {"problem": one.problem.to_dict()} for one in searches]))
        answers.touch()
        with answers.open() as lines:

            def watch(_: Any) -> None:
                for line in lines:
                    outcomes.append(Outcome(**json.loads(line)))
                    measurement.say(f"{len(outcomes):3d}/{len(searches)}  {outcomes[-1]}")

            program = [sys.executable, __file__, "--rank", asked, answers, str(ranks), str(seconds)]
            run([*mpirun(ranks), *program], timeout=2 * seconds * len(searches) + 600, watch=watch)
    return outcomes


def rank_main(asked: Path, answers: Path, ranks: int, seconds: float) -> None:
    """The program of a rank: one JSON line for each search, written by rank 0."""
    comm = load_mpi().COMM_WORLD if ranks > 1 else None
    search(SETTINGS[0].problem(), SearchSettings(iterations=1000, objective="memory"), comm=comm)
    last: tuple[str, Number] = "", 0  # the name of the search before and the memory that it has come to
    for raw in json.loads(asked.read_text()):
        one = Search(**raw | {"problem": FusionProblem.from_dict(raw["problem"])})
        observer = Watcher(one.until)
        if one.enough is not None and last[0] == one.name and last[1] <= one.enough * (1 + TOLERANCE):
            continue
        settings = SearchSettings(time_limit=seconds, seed=one.seed, objective="memory", latency=one.latency)
        _, report = search(one.problem, settings, comm=comm, observer=observer)
        last = one.name, report.peak_memory
        facts = {
            "name": one.name,
            "seed": one.seed,
            "rank_seconds": (report.seconds - observer.seconds) * ranks,
            **{key: getattr(report, key) for key in REPORTED},
        }
        if comm is None or comm.Get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps(facts) + "\n")


class Watcher(SearchObserver):
    """When the first schedule stood, which is made by rule; and whether one is at the bound with so little memory."""

    seconds, there = 0.0, False

    def __init__(self, until: Number | None) -> None:
        self.until = until

    def improved(self, schedule: Schedule, report: SearchReport) -> None:
        self.seconds = self.seconds or report.seconds
        self.there = self.until is not None and report.optimal and report.peak_memory <= self.until * (1 + TOLERANCE)

    def stop(self) -> int:
        return signal.SIGUSR1 if self.there else 0


def middle(values: Sequence[Number | None]) -> Any:
    """The median, of two middle ones the larger; None (never reached) counts as the largest."""
    return sorted(values, key=lambda value: (value is None, value or 0))[len(values) // 2]


def worst(values: Sequence[Number | None]) -> Any:
    """The largest; None (never reached) counts as larger."""
    return None if None in values else max(value for value in values if value is not None)


def text(value: Number | None) -> str:
    """Four digits, or a dash for what was not reached."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


COMMANDS = {"table": table, "seeds": seeds, "curve": curve}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        run_program(main)
