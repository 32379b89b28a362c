"""Search a fused-pipeline schedule, alone or with one chain of annealing per MPI rank.

    mpirun -n 16 python tools/search_schedule.py --problem problem.json --out schedule.json --time-limit 60
    python tools/search_schedule.py --problem problem.json --out schedule.json --iterations 2000000 --seed 1

The best schedule so far is in the output file within a second of being found, so that Ctrl-C keeps it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable

from rlhfuse.errors import InputError, run_program
from rlhfuse.schedule.io import load_schedule, save_schedule
from rlhfuse.schedule.problem import FusionProblem, load_problem
from rlhfuse.schedule.schedule import Schedule
from rlhfuse.schedule.goal import OBJECTIVES
from rlhfuse.schedule.search import SearchReport, search, world_communicator

WRITE_SECONDS = 1.0  # improvements closer together than this share one write
LIVE_SECONDS = 0.5


def main() -> None:
    arguments = parse_arguments()
    comm = world_communicator() if mpi_ranks() > 1 else None
    problem, start = on_rank_zero(comm, lambda: read_input(arguments))
    writer = Writer(arguments.out)
    live = LiveLine(sys.stderr)
    try:
        schedule, report = search(
            problem,
            time_limit=arguments.time_limit,
            iterations=arguments.iterations,
            seed=arguments.seed,
            objective=arguments.objective,
            memory_cap=arguments.memory_cap,
            start=start,
            comm=comm,
            on_improved=writer.improved,
            on_round=live.show,
        )
        if comm is None or comm.Get_rank() == 0:
            writer.improved(schedule, report)
    finally:
        writer.flush()
        live.end()
    if comm is None or comm.Get_rank() == 0:
        print(describe(report))
        print(f"written to {arguments.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search a fused-pipeline schedule by simulated annealing.")
    parser.add_argument("--problem", required=True, help="problem.json: pipelines, placement, times, memory")
    parser.add_argument("--out", required=True, help="schedule.json to write")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop after this long")
    parser.add_argument("--iterations", type=int, metavar="N", help="stop after N tried moves per rank; repeatable")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="latency",
        help="latency: least makespan, stops at its lower bound; memory: then also least peak memory at that makespan",
    )
    parser.add_argument("--memory-cap", type=float, metavar="X", help="replaces the problem's memory_cap on every node")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--force", action="store_true", help="replace an existing output file")
    existing.add_argument("--resume", action="store_true", help="start from the schedule in the output file")
    return parser.parse_args()


def read_input(arguments: argparse.Namespace) -> tuple[FusionProblem, Schedule | None]:
    """The problem, and the schedule to resume from. Raises InputError naming the file and the fix."""
    problem = load_problem(arguments.problem)
    out = Path(arguments.out)
    if arguments.time_limit is None and arguments.iterations is None:
        raise InputError("the search has no end: give --time-limit SECONDS or --iterations N")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: folder {out.parent} does not exist; create it first")
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; give a file name")
    if arguments.resume:
        return problem, load_schedule(out, expect=problem)
    if out.exists() and not arguments.force:
        raise InputError(f"--out {out} exists; --force replaces it, --resume goes on from it")
    return problem, None


def mpi_ranks() -> int:
    """Ranks that the launcher started (Open MPI, MPICH and its kin); 1 without one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


def on_rank_zero(comm: Any, read: Callable[[], Any]) -> Any:
    """What `read` returns on rank 0, on every rank; its InputError is raised on every rank and printed by one."""
    if comm is None:
        return read()
    value, message = None, None
    if comm.Get_rank() == 0:
        try:
            value = read()
        except InputError as error:
            message = str(error)
    value, message = comm.bcast((value, message), root=0)
    os.environ["RANK"] = str(comm.Get_rank())  # run_program prints on rank 0 only
    if message is not None:
        raise InputError(message)
    return value


class Writer:
    """Keeps the output file at the best schedule, without writing more than once a second."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.waiting: tuple[Schedule, SearchReport] | None = None
        self.written = float("-inf")

    def improved(self, schedule: Schedule, report: SearchReport) -> None:
        self.waiting = (schedule, report)
        if time.monotonic() - self.written >= WRITE_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.waiting is None:
            return
        schedule, report = self.waiting
        search_facts = {
            "seed": report.seed,
            "ranks": report.ranks,
            "objective": report.objective,
            "moves": report.moves,
            "seconds": round(report.seconds, 3),
            "first_bound_seconds": report.first_bound_seconds and round(report.first_bound_seconds, 3),
        }
        save_schedule(self.path, schedule, search_facts)
        self.waiting, self.written = None, time.monotonic()


class LiveLine:
    """One line that is rewritten in place on a terminal; silent elsewhere."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.shown = float("-inf")

    def show(self, report: SearchReport) -> None:
        if self.stream.isatty() and time.monotonic() - self.shown >= LIVE_SECONDS:
            self.shown = time.monotonic()
            self.stream.write(f"\r\033[K{describe(report)}")
            self.stream.flush()

    def end(self) -> None:
        if self.shown > 0:
            self.stream.write("\n")


def describe(report: SearchReport) -> str:
    """best, bound, gap, memory, speed."""
    gap = report.makespan / report.lower_bound - 1
    speed = report.moves / report.seconds if report.seconds > 0 else 0.0
    proved = " (optimal)" if report.optimal else ""
    return (
        f"makespan {report.makespan:g}{proved}, bound {report.lower_bound:g}, gap {gap:.2%}, "
        f"memory {report.peak_memory:g} (bound {report.memory_lower_bound:g}), "
        f"{report.moves:,} moves in {report.seconds:.1f} s ({speed:,.0f}/s)"
    )


if __name__ == "__main__":
    run_program(main)
