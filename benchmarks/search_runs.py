"""Runs schedule searches one after the other under one mpirun: what the schedule benchmarks share.

A benchmark describes its runs, `launch` starts the ranks once and yields an outcome as each run ends.
The ranks make a few moves before the first run, so that no run pays for loading kernels. This
file is also the program of the ranks:

    mpirun -n 2 python benchmarks/search_runs.py RUNS.json 2

Rank 0 prints one JSON object per line. Ctrl-C reaches the benchmark alone, which then ends the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launched import end
from paper.table3 import SETTINGS
from rich.console import Console

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_text
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.search.mpi import world_communicator
from rlhfuse.schedule.search.search import SearchObserver, SearchReport, SearchSettings, search


@dataclass(frozen=True)
class Run:
    """One search; `name` tells the benchmark which of its rows this is."""

    name: str
    problem: FusionProblem
    seconds: float
    seed: int = 1
    objective: str = "memory"


@dataclass(frozen=True)
class Outcome:
    """What came of a run. Times count from the start of the search, which the schedules made by rule are part of.

    `improvements`: [seconds, makespan, peak memory] of each incumbent; the first is made by rule.
    """

    name: str
    seed: int
    ranks: int
    makespan: Number
    lower_bound: Number
    peak_memory: Number
    memory_lower_bound: Number
    moves: int
    accepted: int
    seconds: float
    first_bound_seconds: float | None
    improvements: list[list[Number]]
    peak_rss_bytes: list[int]  # of each rank, since its process began

    @property
    def setup_seconds(self) -> float:
        """Until the first schedule stood: no move was tried before."""
        return self.improvements[0][0]

    def seconds_to(self, makespan: Number) -> float | None:
        """When the incumbent was first this fast."""
        return next((at for at, reached, _ in self.improvements if reached <= makespan), None)


def launch(runs: Sequence[Run], ranks: int) -> Iterator[Outcome]:
    """Search `runs` in order on `ranks` processes, yielding each outcome as it is there.

    Raises InputError when there is no mpirun, RuntimeError when the ranks fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        path.write_text(json.dumps([{**asdict(run), "problem": run.problem.to_dict()} for run in runs]))
        command = _launcher(ranks) + [sys.executable, str(Path(__file__).resolve()), str(path), str(ranks)]
        process = subprocess.Popen(
            command, env=_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            for line in process.stdout:
                yield Outcome(**json.loads(line))
            if process.wait() != 0:
                raise RuntimeError(f"the search ranks ended with code {process.returncode}")
        finally:
            end(process)
            process.stdout.close()


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return []
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise InputError(f"--ranks {ranks} needs mpirun, which is not there; pip install rlhfuse[mpi] or --ranks 1")
    return [mpirun, "--oversubscribe", "-n", str(ranks)]


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[1]
    more = {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    if os.geteuid() == 0:  # mpirun refuses root unless told twice
        more |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def main() -> None:
    """The program of a rank: runs in the file named first, one per entry, on as many ranks as named second."""
    raw, ranks = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    comm = world_communicator() if ranks > 1 else None
    runs = [Run(**{**entry, "problem": FusionProblem.from_dict(entry["problem"])}) for entry in raw]
    search(SETTINGS[0].problem(), SearchSettings(iterations=1000, objective="memory"), comm=comm)
    for run in runs:
        outcome = _search(run, comm, ranks)
        if comm is None or comm.Get_rank() == 0:
            print(json.dumps(asdict(outcome)), flush=True)


def _search(run: Run, comm: Any, ranks: int) -> Outcome:
    improvements: list[list[Number]] = []

    class Observer(SearchObserver):
        def improved(self, schedule: Any, report: SearchReport) -> None:
            improvements.append([round(report.seconds, 6), report.makespan, report.peak_memory])

    settings = SearchSettings(time_limit=run.seconds, seed=run.seed, objective=run.objective)
    _, report = search(run.problem, settings, comm=comm, observer=Observer())
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(
        name=run.name,
        seed=run.seed,
        ranks=ranks,
        makespan=report.makespan,
        lower_bound=report.lower_bound,
        peak_memory=report.peak_memory,
        memory_lower_bound=report.memory_lower_bound,
        moves=report.moves,
        accepted=report.accepted,
        seconds=report.seconds,
        first_bound_seconds=report.first_bound_seconds,
        improvements=improvements,
        peak_rss_bytes=comm.allgather(rss) if comm is not None else [rss],
    )


def middle(values: Sequence[Number | None]) -> Number | None:
    """The median, of two middle ones the larger; None (never reached) counts as the largest."""
    return sorted(values, key=lambda value: (value is None, value or 0))[len(values) // 2]


def worst(values: Sequence[Number | None]) -> Number | None:
    """The largest; None (never reached) counts as larger."""
    return None if None in values else max(values)


def machine() -> dict[str, Any]:
    """Facts to read a measurement by."""
    names = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def positive(text: str) -> float:
    """An argument above 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def counting(text: str) -> int:
    """An argument of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def named(option: str, text: str, known: Mapping[str, Any]) -> list[Any]:
    """Those of `known` that the option's text names, in its order. Raises InputError for any other name."""
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{option} {text}: {name!r} is unknown; give some of {', '.join(known)}")
    return [known[name] for name in names]


def console() -> Console:
    """Where progress and tables go: stderr, wide enough for a table when it is not a terminal."""
    made = Console(stderr=True)
    return made if made.is_terminal else Console(stderr=True, width=160)


def finish(result: dict[str, Any], out: str | None) -> None:
    """Print the one JSON object on stdout, and write it to `out`."""
    text = json.dumps(result)
    if out:
        write_text(out, text + "\n")
    print(text)


if __name__ == "__main__":
    run_program(main)
