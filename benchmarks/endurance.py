"""Whether a long training stays as it began: memory, open files and threads of every rank, time of every iteration.

    python benchmarks/endurance.py --iterations 300
    python benchmarks/endurance.py --config examples/quickstart.yaml --ranks 4 --iterations 60 trainer.save_every=5

Looks at the ranks from outside whenever a line of metrics.jsonl is there; the first iterations are left out. Responses
change as the policy learns, so the seconds and the CPU time of an iteration are fitted by a line at equal tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Figure, Measurement, counting, options
from processes import ROOT, train

from rlhfuse.base.errors import InputError, run_program

WARM_UP = 20  # iterations
WINDOW = 5  # iterations of a median: memory depends on where in its iteration a rank is
LEAST = 4  # iterations in a slope
CPU, SECONDS = "CPU seconds of all ranks", "seconds of an iteration"
MEMORY_GOAL, SLOPE_GOAL = 1.05, 1.0  # the most of the least after the warm-up; % per 100 iterations
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


def windows(looks: Sequence[Look], name: str) -> list[int]:
    """Medians of one rank: of memory by window; of files and threads, which come and go with an iteration, by half."""
    width = max(min(WINDOW if name == "resident_bytes" else len(looks), len(looks) // 2), 1)
    starts = range(0, len(looks) - width + 1, width)
    return [statistics.median_low(getattr(look, name) for look in looks[start : start + width]) for start in starts]


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
    if arguments.iterations < (least := skipped + LEAST):
        raise InputError(f"--iterations {arguments.iterations}: {skipped} are left out, give {least} or more")
    measurement, looks = Measurement("endurance", arguments), []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        changes = [f"trainer.iterations={arguments.iterations}", "trainer.export=false", *arguments.overrides]
        watched = dict(ranks=arguments.ranks, timeout=arguments.timeout, watch=Watch(out / "metrics.jsonl", looks))
        rows = train(Path(arguments.config).resolve(), out, changes, **watched)[skipped:]
    after = [look for look in looks if look.iteration >= skipped]
    ranks = sorted({look.rank for look in after})
    report_ranks(measurement, {rank: [look for look in after if look.rank == rank] for rank in ranks})
    report_slopes(measurement, slopes_of(rows, cpu_of(looks)))
    measurement.facts(iterations=arguments.iterations, left_out=skipped)
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, seed=False)
    parser.add_argument("--config", default=str(ROOT / "examples/quickstart.yaml"))
    parser.add_argument("--ranks", type=counting, default=4)
    parser.add_argument("--iterations", type=counting, default=300)
    parser.add_argument("--timeout", type=counting, default=7200, help="seconds that the training may take")
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
        SECONDS: Slope.of(seconds, tokens),
        CPU: Slope.of({i: used for i, used in cpu.items() if i in tokens}, tokens),
    }


def report_ranks(measurement: Measurement, looks: Mapping[int, Sequence[Look]]) -> None:
    rows, growth, changes = [], [], {"files": [], "threads": []}
    for rank, own in looks.items():
        memory = windows(own, "resident_bytes")
        growth.append(max(memory) / min(memory))
        cells = [str(rank), *(f"{one / 1e6:.1f}" for one in (memory[0], memory[-1], max(memory))), f"{growth[-1]:.3f}"]
        for name, each in changes.items():
            seen = windows(own, name)
            each.append(max(seen) - min(seen))
            cells.append(f"{seen[0]} -> {seen[-1]}")
        rows.append(cells)
    measurement.figure("memory_growth", Figure(max(growth), "x", min(growth), max(growth)).at_most(MEMORY_GOAL))
    for name, each in changes.items():
        measurement.figure(f"{name}_changed", Figure(max(each)).at_most(0))
    head = ("rank", "MB begin", "MB end", "MB at most", "most / least", "files", "threads")
    measurement.table("ranks", "Ranks after the warm-up", head, rows)


def report_slopes(measurement: Measurement, slopes: Mapping[str, Slope]) -> None:
    """The most that a slope can be, at two standard errors, is held against the goal."""
    unit, rows = "% per 100 iterations", []
    for name, key in (("cpu", CPU), ("seconds", SECONDS)):
        slope = slopes[key]
        most = Figure(slope.percent + 2 * slope.standard_error, unit)
        measurement.figure(f"{name}_slope", slope.percent, unit)
        measurement.figure(f"{name}_slope.error", slope.standard_error, unit)
        measurement.figure(f"{name}_slope.most", most.at_most(SLOPE_GOAL))
        rows.append([key, f"{slope.mean:.4g}", f"{slope.percent:+.2f}", f"{slope.standard_error:.2f}"])
    measurement.table("slopes", "Over the iterations, at equal tokens", ("of", "mean s", unit, "standard error"), rows)


if __name__ == "__main__":
    run_program(main)
