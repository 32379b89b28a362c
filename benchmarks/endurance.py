"""Whether a long training stays as it began: memory, open files and threads of every rank, time of every iteration.

    python benchmarks/endurance.py --iterations 300 --samples samples.csv
    python benchmarks/endurance.py --config examples/quickstart.yaml --ranks 4 --iterations 60 trainer.save_every=5

Looks at the ranks from outside whenever a line of metrics.jsonl is there; the first iterations are left out. Responses
change as the policy learns, so the seconds and the CPU time of an iteration are fitted by a line at equal tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Figure, Measurement, counting, options
from processes import ROOT, train

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_text

WARM_UP = 10  # iterations
WINDOW = 5  # iterations of a median: memory depends on where in its iteration a rank is
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
        ends = looks[:width], looks[-width:]

        def both(value: Callable[[list[int]], Any], name: str) -> list[Any]:
            return [value([getattr(look, name) for look in part]) for part in ends]

        memory, most = both(statistics.median, "resident_bytes"), max(look.resident_bytes for look in looks)
        return RankLife(rank, *memory, most, *both(min, "files"), *both(min, "threads"))


@dataclass(frozen=True)
class Slope:
    """A line through values of iterations: their mean, growth in % of it per 100 iterations, its standard error."""

    mean: float
    percent: float
    standard_error: float

    @staticmethod
    def of(values: Mapping[int, float], beside: Mapping[int, float] | None = None) -> Slope:
        """Ordinary least squares; `values` by iteration, four at least. `beside`: the second regressor."""
        x = np.asarray([[1.0, i, *([beside[i]] if beside else [])] for i in values], dtype=float)
        y = np.asarray(list(values.values()), dtype=float)
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
    if arguments.samples:
        write_text(arguments.samples, "")  # said before hours of training
    measurement, looks = Measurement("endurance", arguments), []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(arguments.run_dir or Path(folder) / "run").resolve()
        rows = train(
            Path(arguments.config).resolve(),
            out,
            [f"trainer.iterations={arguments.iterations}", "trainer.export=false", *arguments.overrides],
            ranks=arguments.ranks,
            timeout=arguments.timeout,
            watch=Watch(out / "metrics.jsonl", looks),
        )[skipped:]
    if arguments.samples:
        head = ",".join(field.name for field in fields(Look))
        write_text(arguments.samples, "\n".join([head, *(",".join(map(str, astuple(look))) for look in looks)]) + "\n")
    after = [look for look in looks if look.iteration >= skipped]
    lives = [
        RankLife.of(rank, [look for look in after if look.rank == rank]) for rank in sorted({one.rank for one in after})
    ]
    slopes = slopes_of(rows, cpu_of(looks))
    report(measurement, lives, slopes)
    measurement.facts(iterations=arguments.iterations, left_out=skipped, ranks=[asdict(life) for life in lives])
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, seed=False)
    parser.add_argument("--config", default=str(ROOT / "examples/quickstart.yaml"))
    parser.add_argument("--ranks", type=counting, default=4)
    parser.add_argument("--iterations", type=counting, default=300)
    parser.add_argument("--run-dir", metavar="DIR", help="keep the run here")
    parser.add_argument("--timeout", type=counting, default=7200, help="seconds that the training may take")
    parser.add_argument("--samples", metavar="FILE", help="write every look at every rank here, as CSV")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the config's")
    arguments = parser.parse_intermixed_args()
    if arguments.quick:
        arguments.overrides = [*QUICK, *arguments.overrides]
    return arguments


class Watch:
    """Looks at all ranks whenever a line more is in the metrics."""

    def __init__(self, metrics: Path, looks: list[Look]) -> None:
        self._metrics, self._looks, self._lines = metrics, looks, 0

    def __call__(self, process: Any) -> None:
        lines = self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
        if lines > self._lines and process.poll() is None:
            self._lines = lines
            self._looks += look(process.pid, lines - 1)


def look(launcher: int, iteration: int) -> Iterator[Look]:
    """All ranks; those that have just ended are left out."""
    for child in psutil.Process(launcher).children():
        try:
            rank, used = child.environ().get("RANK"), child.cpu_times()
            if rank is not None:
                memory, cpu = child.memory_info().rss, used.user + used.system
                yield Look(iteration, int(rank), memory, child.num_fds(), child.num_threads(), cpu)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # a rank that has ended has no environment to read
            continue


def cpu_of(looks: Sequence[Look]) -> dict[int, float]:
    """CPU seconds of all ranks in each iteration that was looked at, as the one before it was, on all of them."""
    seen: dict[int, dict[int, float]] = {}
    for one in looks:
        seen.setdefault(one.iteration, {})[one.rank] = one.cpu_seconds
    ranks = {one.rank for one in looks}
    whole = {iteration: sum(by_rank.values()) for iteration, by_rank in seen.items() if by_rank.keys() == ranks}
    return {i: whole[i] - whole[i - 1] for i in whole if i - 1 in whole}


def slopes_of(rows: Sequence[dict[str, Any]], cpu: Mapping[int, float]) -> dict[str, Slope]:
    """`rows` of metrics.jsonl after the warm-up; `cpu` by iteration."""
    seconds = {row["iteration"]: row["timing_s/step"] for row in rows}
    tokens = {row["iteration"]: sum(row["lengths/output"]) for row in rows}
    return {
        "iteration": Slope.of(seconds),
        "generated token": Slope.of({i: seconds[i] / tokens[i] for i in seconds}),
        "iteration at equal tokens": Slope.of(seconds, tokens),
        CPU: Slope.of({i: used for i, used in cpu.items() if i in tokens}, tokens),
    }


def report(measurement: Measurement, lives: Sequence[RankLife], slopes: Mapping[str, Slope]) -> None:
    """Tables and figures. What is certain of a slope, at two standard errors, is held against its goal."""
    growth = [life.growth for life in lives]
    measurement.figure("memory_growth", Figure(max(growth), "x", min(growth), max(growth)).at_most(MEMORY_GOAL))
    for name in ("files", "threads"):
        more = max(getattr(life, f"{name}_end") - getattr(life, f"{name}_begin") for life in lives)
        measurement.figure(f"{name}_more", Figure(more).at_most(0))
    slope = slopes[CPU]
    slower = slope.percent - 2 * slope.standard_error
    measurement.figure("cpu_slope_certain", Figure(slower, "% per 100 iterations").at_most(0))
    for name, key in (("cpu_slope", CPU), ("seconds_slope", "iteration at equal tokens")):
        measurement.figure(name, slopes[key].percent, "% per 100 iterations")
        measurement.figure(f"{name}.error", slopes[key].standard_error, "% per 100 iterations")
    rows = []
    for life in lives:
        sizes = (life.memory_begin_bytes, life.memory_end_bytes, life.memory_most_bytes)
        counts = f"{life.files_begin} -> {life.files_end}", f"{life.threads_begin} -> {life.threads_end}"
        rows.append([str(life.rank), *(f"{size / 1e6:.1f}" for size in sizes), f"{life.growth:.3f}", *counts])
    head = ("rank", "MB begin", "MB end", "MB most", "end / begin", "files", "threads")
    measurement.table("ranks", "Ranks after the warm-up", head, rows)
    rows = [
        [name, f"{one.mean:.4g}", f"{one.percent:+.2f}", f"{one.standard_error:.2f}"] for name, one in slopes.items()
    ]
    head = ("of", "mean s", "% per 100 iterations", "standard error")
    measurement.table("slopes", "Seconds, over the iterations", head, rows)


if __name__ == "__main__":
    run_program(main)
