"""Whether a long training stays as it began: memory, open files and threads of every rank, time of every iteration.

    python benchmarks/endurance.py --iterations 300 --out endurance.json --samples samples.csv
    python benchmarks/endurance.py --config examples/quickstart.yaml --ranks 4 --iterations 60 trainer.save_every=5
    python benchmarks/endurance.py --quick    a few small iterations, to see that it runs

Starts the training as users do, with torchrun and tools/train_ppo.py, and looks at its ranks from outside whenever a
line of metrics.jsonl is there. The first iterations, in which kernels compile and caches fill, are left out.

Memory of one moment depends on where in its iteration a rank is, so each figure is the median of five iterations;
of open files and threads it is the least of the five.
Time per iteration changes for a good reason too: responses get longer or shorter as the policy learns. So a straight
line is fitted to the seconds of an iteration, to those of a generated token, and to those of an iteration at equal
tokens (tokens are a second regressor), each slope with its standard error, in percent of the mean per 100 iterations.
On a busy machine they say how busy it was. The CPU time of all ranks, at equal tokens too, says little of that, as
little as memory and files do, and is held against the goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from launched import end
from rich.table import Table
from search_runs import console, counting, finish, machine

from rlhfuse.errors import InputError, run_program, writing
from rlhfuse.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 10  # iterations
WINDOW = 5  # iterations of a median
POLL_SECONDS = 0.05
LEAST = 4  # iterations in a slope
CPU = "CPU of all ranks at equal tokens"
MEMORY_GOAL = 1.05  # at the end, of what it was after the warm-up
QUICK = (
    "rollout.prompts_per_iteration=8",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=16",
    "fusion.search_seconds=0.3",
    "fusion.least_threshold=0",
    "algorithm.minibatches=1",
)


@dataclass(frozen=True)
class Look:
    """A rank as it was when the metrics of an iteration had just been written."""

    iteration: int
    rank: int
    resident_bytes: int
    files: int  # descriptors: sockets and pipes too
    threads: int
    cpu_seconds: float  # since the rank began, in user and system mode


@dataclass(frozen=True)
class RankLife:
    """What became of one rank over the first and the last iterations after the warm-up."""

    rank: int
    memory_begin_bytes: float  # medians
    memory_end_bytes: float
    memory_most_bytes: int  # in between
    files_begin: int  # least: a checkpoint that is being written is a file and a thread more
    files_end: int
    threads_begin: int
    threads_end: int

    @property
    def growth(self) -> float:
        return self.memory_end_bytes / self.memory_begin_bytes

    @staticmethod
    def of(rank: int, looks: Sequence[Look]) -> RankLife:
        """`looks`: of this rank after the warm-up, in order."""
        width = max(min(WINDOW, len(looks) // 2), 1)
        first, last = looks[:width], looks[-width:]

        def ends(figure: Callable[[list[int]], float], name: str) -> list[float]:
            return [figure([getattr(one, name) for one in part]) for part in (first, last)]

        memory, most = ends(statistics.median, "resident_bytes"), max(one.resident_bytes for one in looks)
        return RankLife(rank, *memory, most, *ends(min, "files"), *ends(min, "threads"))


@dataclass(frozen=True)
class Slope:
    """A straight line through values of iterations: their mean, growth in % of it per 100 iterations, its error."""

    mean: float
    percent: float
    standard_error: float

    @staticmethod
    def of(values: Mapping[int, float], beside: Mapping[int, float] | None = None) -> Slope:
        """Ordinary least squares; `values` by iteration, four at least. `beside`: the second regressor."""
        columns = [[1.0, one, *([beside[one]] if beside else [])] for one in values]
        x, y = np.asarray(columns, dtype=float), np.asarray(list(values.values()), dtype=float)
        x[:, 1:] -= x[:, 1:].mean(axis=0)
        inverse = np.linalg.pinv(x.T @ x)  # of equal tokens in all iterations too
        fitted = inverse @ x.T @ y
        rest = y - x @ fitted
        error = np.sqrt(rest @ rest / (len(y) - np.linalg.matrix_rank(x)) * inverse[1, 1])
        unit = 100 * 100 / y.mean()
        return Slope(float(y.mean()), float(fitted[1] * unit), float(error * unit))


def main() -> None:
    arguments = parse_arguments()
    skipped = 1 if arguments.quick else WARM_UP
    if arguments.iterations < skipped + LEAST:
        least = skipped + LEAST
        raise InputError(f"--iterations {arguments.iterations}: {skipped} are left out, give {least} or more")
    if arguments.run_dir and Path(arguments.run_dir).exists():
        raise InputError(f"--run-dir {arguments.run_dir} exists; give another name")
    screen, load, begun = console(), os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(arguments.run_dir or Path(folder) / "run").resolve()
        looks = train(arguments, run_dir, Path(folder) / "output.txt")
        rows = read_metrics(run_dir / "metrics.jsonl")[skipped:]
    after = [look for look in looks if look.iteration >= skipped]
    lives = [
        RankLife.of(rank, [one for one in after if one.rank == rank]) for rank in sorted({one.rank for one in after})
    ]
    slopes = slopes_of(rows, cpu_of(looks))
    screen.print(memory_table(lives), slope_table(slopes), highlight=False)
    result = {
        "benchmark": "endurance",
        "machine": {**machine(), "ranks": arguments.ranks, "load_before": load, "load_after": os.getloadavg()[0]},
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "seconds": time.monotonic() - begun,
        "quick": arguments.quick,
        "iterations": arguments.iterations,
        "left_out": skipped,
        "ranks": [{**asdict(life), "growth": life.growth} for life in lives],
        "slopes": {name: asdict(slope) for name, slope in slopes.items()},
        "goals": [] if arguments.quick else goals(lives, slopes),
    }
    finish(result, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", default=str(ROOT / "examples/quickstart.yaml"))
    parser.add_argument("--ranks", type=counting, default=4)
    parser.add_argument("--iterations", type=counting, default=300)
    parser.add_argument("--quick", action="store_true", help="small iterations, one of them left out; no goals")
    parser.add_argument("--run-dir", metavar="DIR", help="keep the run here")
    parser.add_argument("--timeout", type=counting, default=7200, help="seconds that the training may take")
    parser.add_argument("--samples", metavar="FILE", help="write every look at every rank here, as CSV")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the config's")
    return parser.parse_intermixed_args()


# the run --------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace, run_dir: Path, output: Path) -> list[Look]:
    """Raises RuntimeError with the end of the output when the training fails or takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    command += [str(ROOT / "tools/train_ppo.py"), "--config", arguments.config]
    command += [f"trainer.output_dir={run_dir}", f"trainer.iterations={arguments.iterations}"]
    command += ["trainer.export=false", *(QUICK if arguments.quick else ()), *arguments.overrides]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    looks: list[Look] = []
    with writing(arguments.samples or os.devnull, "give a path in a writable folder"):
        table = open(arguments.samples or os.devnull, "w")
    with open(output, "w") as stream, table:
        print(*(field.name for field in fields(Look)), sep=",", file=table)
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            for one in watch(process, run_dir / "metrics.jsonl", arguments.timeout):
                looks.append(one)
                print(*astuple(one), sep=",", file=table, flush=True)
        finally:
            end(process)
    if process.returncode:
        raise RuntimeError(f"the training ended with code {process.returncode}:\n{output.read_text()[-4000:]}")
    return looks


def watch(process: subprocess.Popen, metrics: Path, timeout: float) -> Iterator[Look]:
    """Looks at all ranks whenever a line more is in `metrics`, until the process ends."""
    until, lines = time.monotonic() + timeout, 0
    while process.poll() is None:
        if time.monotonic() > until:
            raise RuntimeError(f"the training took more than {timeout} s; give a longer --timeout")
        now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if now > lines:
            lines = now
            yield from look(process.pid, lines - 1)
        time.sleep(POLL_SECONDS)


def look(launcher: int, iteration: int) -> Iterator[Look]:
    """All ranks; those that have just ended are left out."""
    for one in psutil.Process(launcher).children():
        try:
            rank = one.environ().get("RANK")
            if rank is not None:
                used = one.cpu_times()
                cpu = used.user + used.system
                yield Look(iteration, int(rank), one.memory_info().rss, one.num_fds(), one.num_threads(), cpu)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # a rank that has ended has no environment to read
            continue


# figures --------------------------------------------------------------------------------------------------------


def cpu_of(looks: Sequence[Look]) -> dict[int, float]:
    """CPU seconds of all ranks in each iteration that was looked at, as the one before it was, on all of them."""
    seen: dict[int, dict[int, float]] = {}
    for one in looks:
        seen.setdefault(one.iteration, {})[one.rank] = one.cpu_seconds
    ranks = set().union(*seen.values())
    whole = {iteration: sum(by_rank.values()) for iteration, by_rank in seen.items() if by_rank.keys() == ranks}
    return {one: whole[one] - whole[one - 1] for one in whole if one - 1 in whole}


def slopes_of(rows: Sequence[dict[str, Any]], cpu: Mapping[int, float]) -> dict[str, Slope]:
    """`rows` of metrics.jsonl after the warm-up; `cpu` by iteration."""
    seconds = {row["iteration"]: row["timing_s/step"] for row in rows}
    tokens = {row["iteration"]: sum(row["lengths/output"]) for row in rows}
    return {
        "iteration": Slope.of(seconds),
        "generated token": Slope.of({one: seconds[one] / tokens[one] for one in seconds}),
        "iteration at equal tokens": Slope.of(seconds, tokens),
        CPU: Slope.of({one: used for one, used in cpu.items() if one in tokens}, tokens),
    }


def goals(lives: Sequence[RankLife], slopes: Mapping[str, Slope]) -> list[dict[str, Any]]:
    growth = max(life.growth for life in lives)
    files = max(life.files_end - life.files_begin for life in lives)
    threads = max(life.threads_end - life.threads_begin for life in lives)
    slope = slopes[CPU]
    slower = slope.percent - 2 * slope.standard_error  # what is certain of it, at two standard errors
    found = [
        ("memory at the end, of that after the warm-up, worst rank", MEMORY_GOAL, growth),
        ("files opened and not closed, worst rank", 0, files),
        ("threads more than before, worst rank", 0, threads),
        (f"slope of {CPU} less two standard errors, % per 100 iterations", 0, slower),
    ]
    return [{"figure": f, "goal": goal, "measured": value, "reached": value <= goal} for f, goal, value in found]


def memory_table(lives: Sequence[RankLife]) -> Table:
    table = Table("rank", "MB begin", "MB end", "ratio", "MB most", "files", "threads", title="ranks after the warm-up")
    for one in lives:
        sizes = [f"{size / 1e6:.1f}" for size in (one.memory_begin_bytes, one.memory_end_bytes, one.memory_most_bytes)]
        files, threads = f"{one.files_begin} -> {one.files_end}", f"{one.threads_begin} -> {one.threads_end}"
        table.add_row(str(one.rank), *sizes[:2], f"{one.growth:.3f}", sizes[2], files, threads)
    return table


def slope_table(slopes: Mapping[str, Slope]) -> Table:
    table = Table("of", "mean s", "% per 100 iterations", "standard error", title="seconds, over the iterations")
    for name, one in slopes.items():
        table.add_row(name, f"{one.mean:.4g}", f"{one.percent:+.2f}", f"{one.standard_error:.2f}")
    return table


if __name__ == "__main__":
    run_program(main)
