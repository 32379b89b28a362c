"""Search a fused-pipeline schedule by simulated annealing, alone or on every rank of an MPI job.

    mpirun -n 16 python tools/search_schedule.py --problem problem.json --out schedule.json --time-limit 60
    python tools/search_schedule.py --problem problem.json --out schedule.json --iterations 2000000 --seed 1

The best schedule so far is in the output file within a second of being found. Ctrl-C, SIGTERM and
SIGUSR1 end the search on every rank with that file complete, and --resume goes on from it.
"""

from __future__ import annotations

import time

BEGUN = time.perf_counter()  # before the imports, which are timed

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpi_ranks import MpiRanks
from program import run_program
from search_output import EarlierRuns, LiveLine, ResultFile, describe
from stop_signals import StopSignals

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import read_json
from rlhfuse.schedule.io import load_schedule
from rlhfuse.schedule.ir.evaluate import tidy
from rlhfuse.schedule.ir.problem import FusionProblem, load_problem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import check_caps
from rlhfuse.schedule.search.library import Library
from rlhfuse.schedule.search.search import SearchObserver, SearchReport, SearchSettings, search
from rlhfuse.schedule.search.solution import OBJECTIVES, Objective

EXIT_CODES = """exit codes:
  0    done: proved optimal, or the time limit or the number of moves is reached
  1    a failure; mpirun also returns 1 when it is ended itself by Ctrl-C or SIGTERM (the file is whole)
  2    bad input, said in one line; nothing was computed
  130  ended by Ctrl-C, 143 by SIGTERM, 138 by SIGUSR1: the best so far is in the file, --resume goes on.
       mpirun passes SIGUSR1 on to its ranks; scripts/search_schedule.sh turns the other two into it.
       A second Ctrl-C ends the process where it stands."""


class Task(NamedTuple):
    """What is to be done, checked: the same on every rank."""

    arguments: argparse.Namespace
    problem: FusionProblem
    settings: SearchSettings
    start: Schedule | None
    earlier: EarlierRuns


def main() -> int:
    imported = time.perf_counter()
    with StopSignals() as signals:
        ranks = MpiRanks.here()
        ready = time.perf_counter()
        with ranks.together():
            task = ranks.from_first(lambda: read_task(parse_arguments()))
            if ranks.rank == 0:
                mpi = f", MPI in {ready - imported:.2f} s ({ranks.size} ranks)" if ranks.comm is not None else ""
                print(f"imports in {imported - BEGUN:.2f} s{mpi}", file=sys.stderr, flush=True)
            return run_search(task, ranks.comm, signals)


class Output(SearchObserver):
    """The output file and the live line of a search, and the signals that end it."""

    def __init__(self, task: Task, signals: StopSignals) -> None:
        self.result = ResultFile(task.arguments.out, task.earlier)
        self.live = LiveLine(sys.stderr, task.settings.time_limit)
        self.signals = signals

    def improved(self, schedule: Schedule, report: SearchReport) -> None:
        self.result.improved(schedule, report)

    def round_ended(self, report: SearchReport) -> None:
        compiling_is_next = report.moves == 0
        self.result.write(at_once=compiling_is_next or self.signals.received > 0)
        self.live.show(report)

    def stop(self) -> int:
        return self.signals.received


def run_search(task: Task, comm: Any, signals: StopSignals) -> int:
    """Search and write on rank 0; returns the exit code."""
    output, out = Output(task, signals), task.arguments.out
    try:
        schedule, report = search(task.problem, task.settings, start=task.start, comm=comm, observer=output)
    finally:
        output.live.end()
        output.result.write(at_once=True)
    if comm is None or comm.Get_rank() == 0:
        output.result.improved(schedule, report)
        output.result.write(at_once=True, last=True)
        Library.at(task.arguments.library).keep(schedule)
        print(describe(report), flush=True)
        if report.signal:
            print(
                f"stopped by {StopSignals.name(report.signal)} after {report.seconds:.1f} s; best so far is in {out}; "
                "go on with --resume",
                file=sys.stderr,
            )
        else:
            print(f"written to {out}")
    return 128 + report.signal if report.signal else 0


class Parser(argparse.ArgumentParser):
    """One line for what cannot be parsed, as for every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        description="Search a fused-pipeline schedule by simulated annealing.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problem", required=True, help="problem.json: pipelines, placement, times, memory")
    parser.add_argument("--out", required=True, help="schedule.json to write")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop after this long, counted from when the kernels are ready",
    )
    parser.add_argument("--iterations", type=int, metavar="N", help="stop after N tried moves per rank; repeatable")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="latency",
        help="latency: least makespan, stops at its lower bound; memory: then also least peak memory at that makespan",
    )
    parser.add_argument(
        "--latency",
        type=float,
        metavar="X",
        help="with --objective memory: any makespan up to X is fast enough, least peak memory of those",
    )
    parser.add_argument("--memory-cap", type=float, metavar="X", help="replaces the problem's memory_cap on every node")
    parser.add_argument(
        "--library",
        default="auto",
        metavar="FOLDER",
        help="of the best schedules found, with which searches with a time limit begin; '' for none [~/.cache/rlhfuse]",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--force", action="store_true", help="replace an existing output file")
    existing.add_argument(
        "--resume", action="store_true", help="go on from the output file's schedule; start afresh if there is none"
    )
    return parser.parse_args()


def read_task(arguments: argparse.Namespace) -> Task:
    """Check everything before anything is computed. Raises InputError naming the place and the fix."""
    problem = load_problem(arguments.problem)
    try:
        if arguments.memory_cap is not None:
            problem = replace(problem, memory_cap=tidy(arguments.memory_cap))
        check_caps(problem)
        Objective(problem, arguments.objective, arguments.latency)
    except InputError as error:
        raise InputError(f"{arguments.problem}: {error}") from None
    if arguments.time_limit is None and arguments.iterations is None:
        raise InputError("the search has no end: give --time-limit SECONDS or --iterations N")
    settings = SearchSettings(
        arguments.time_limit, arguments.iterations, arguments.seed, arguments.objective, arguments.latency
    )
    check_output(Path(arguments.out), arguments)
    if not arguments.resume:
        return Task(arguments, problem, settings, known_schedule(arguments, problem), EarlierRuns())
    if not Path(arguments.out).exists():
        print(f"{arguments.out} is not there yet: starting afresh", file=sys.stderr)
        return Task(arguments, problem, settings, known_schedule(arguments, problem), EarlierRuns())
    start = load_schedule(arguments.out, expect=problem)
    earlier = EarlierRuns.read(read_json(arguments.out), arguments.out)
    print(f"going on from {arguments.out}, after {earlier.seconds:.1f} s and {earlier.moves:,} moves", file=sys.stderr)
    other = first_difference(start.problem, problem)
    if other:
        print(f"{arguments.out} was made for {other}; its order is priced again", file=sys.stderr)
        earlier = earlier.model_copy(update={"first_bound_seconds": None})
    return Task(arguments, problem, settings, start, earlier)


def known_schedule(arguments: argparse.Namespace, problem: FusionProblem) -> Schedule | None:
    """What the library knows; a search of so many moves, which is to be the same on every machine, does not ask it."""
    if arguments.iterations is not None:
        return None
    library = Library.at(arguments.library)
    if known := library.find(problem):
        print(f"going on from the best schedule of {library.folder}", file=sys.stderr)
    return known


def check_output(out: Path, arguments: argparse.Namespace) -> None:
    """Raise InputError unless a file can be written to `out`, and may be."""
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: folder {out.parent} does not exist; create it first")
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; give a file name")
    if out.exists() and out.samefile(arguments.problem):
        raise InputError(f"--out {out} is the problem itself; give another file name")
    if out.exists() and not (arguments.force or arguments.resume):
        raise InputError(f"--out {out} exists; --force replaces it, --resume goes on from it")
    ResultFile.check_writable(out)


def first_difference(found: FusionProblem, expected: FusionProblem) -> str:
    """Where two problems of the same pipelines differ in times or memory; empty when they do not."""
    for key in ("transfer", "memory_cap", "static_memory"):
        if getattr(found, key) != getattr(expected, key):
            return f"{key} {getattr(found, key)}, not {getattr(expected, key)}"
    for pipeline in expected.pipelines:
        other = found.pipeline(pipeline.name)
        for key in ("forward", "backward", "weight_gradient", "activation", "weight_activation"):
            if getattr(other, key) != getattr(pipeline, key):
                return f"pipeline {pipeline.name} with {key} {getattr(other, key)}, not {getattr(pipeline, key)}"
    return ""


run = partial(run_program, main)  # the installed program

if __name__ == "__main__":
    run()
