"""What the benchmark programs share: options, sides that take turns, figures, tables, one results file.

A figure is a value with its unit and, where it comes of several rounds, the least and the most of a round. The file
holds figures and tables by name, with command, commit, machine and load: pages of the documentation are filled from
it by docs/make/generate_docs.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

import rlhfuse.tools  # noqa: F401  # puts the modules of tools on the path
from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_text
from rlhfuse.monitor.pace import cpu_seconds
from rlhfuse.simulator.lengths import SampleLengths, load_lengths

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "docs" / "make"))  # where pages get their figures and charts
DATA = ROOT.parent / "shared" / "data"  # models and traces that are no part of the repository
TRACE = DATA / "traces" / "arxiv_llama2tok.csv"
BUSY_CORES = 0.1  # taken by other programs: with more of them the figures are not to be trusted

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """A named value of a measurement; `least` and `most` are of single rounds."""

    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    rounds: int | None = None
    goal: str | None = None  # such as ">= 1.2"
    reached: bool | None = None

    @staticmethod
    def of(values: Sequence[float], unit: str = "") -> Figure:
        """The median over rounds."""
        return Figure(statistics.median(values), unit, min(values), max(values), len(values))

    @staticmethod
    def ratio(slow: Sequence[float], fast: Sequence[float]) -> Figure:
        """How many times as fast: the median of `slow` over `fast` of the same round."""
        return Figure.of([one / other for one, other in zip(slow, fast, strict=True)], "x")

    def at_least(self, goal: float) -> Figure:
        return replace(self, goal=f">= {goal:g}", reached=self.value >= goal)

    def at_most(self, goal: float) -> Figure:
        return replace(self, goal=f"<= {goal:g}", reached=self.value <= goal)

    def text(self, form: str = ".2f") -> str:
        spread = f" ({self.least:{form}}-{self.most:{form}})" if self.least is not None else ""
        return f"{self.value:{form}}{spread}"


def take_turns(sides: Mapping[str, Callable[[int], T]], rounds: int, warm_up: bool = False) -> dict[str, list[T]]:
    """Every side once in each round, another one first in each; what each returned, in order of rounds.

    A side is called with the number of the round. Round -1 warms up and is not kept.
    """
    names, answers = list(sides), {name: [] for name in sides}
    for number in range(-1 if warm_up else 0, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            answer = sides[name](number)
            if number >= 0:
                answers[name].append(answer)
    return answers


class Measurement:
    """Figures and tables of one benchmark program; prints them as they come and writes them at the end."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        """`arguments`: of `options`. Raises InputError where --out has no folder."""
        self.name, self.quick, self.arguments = name, bool(arguments.quick), arguments
        self.out = Path(arguments.out) if arguments.out else None if self.quick else RESULTS / f"{name}.json"
        RESULTS.mkdir(exist_ok=True)
        if self.out and not self.out.parent.is_dir():
            raise InputError(f"--out {self.out}: folder {self.out.parent} is not there; make it first")
        self.screen = Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=160)
        self._figures: dict[str, Figure] = {}
        self._tables: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}
        self._begun, self._load = time.monotonic(), os.getloadavg()[0]
        self._machine_seconds = machine_cpu_seconds()
        self._own_seconds = own_cpu_seconds()

    def say(self, text: str) -> None:
        self.screen.print(text, highlight=False, markup=False)

    def figure(self, name: str, value: Figure | float, unit: str = "") -> Figure:
        """Keep a figure. A quick run is no measurement: it has no goals."""
        figure = value if isinstance(value, Figure) else Figure(float(value), unit)
        self._figures[name] = replace(figure, goal=None, reached=None) if self.quick else figure
        return figure

    def part(self, name: str) -> Part:
        """The figures of one case, whose names begin with `name`."""
        return Part(self, name)

    def facts(self, **facts: Any) -> None:
        """Keep what a reader needs beside the figures: settings, versions, raw values; JSON values."""
        self._facts.update(facts)

    def table(self, name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Keep and print a table of text."""
        self._tables[name] = {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        table = Table(title=title)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        self.screen.print(table)

    def finish(self) -> dict[str, Any]:
        """Print goals and load, write the results file. Call it when all processes have ended."""
        seconds = time.monotonic() - self._begun
        others = None
        if self._machine_seconds is not None:
            spent = machine_cpu_seconds() - self._machine_seconds - (own_cpu_seconds() - self._own_seconds)
            others = max(0.0, spent / seconds)
        if others is not None and others > BUSY_CORES:
            self.say(f"other programs took {others:.2f} cores meanwhile: these figures are not to be trusted")
        for name, figure in self._figures.items():
            if figure.reached is not None:
                self.say(f"{name}: {figure.text('.3g')}, goal {figure.goal}: {'yes' if figure.reached else 'NO'}")
        result = {
            "benchmark": self.name,
            "quick": self.quick,
            "command": command(sys.argv),
            "commit": git("rev-parse", "--short", "HEAD"),
            "dirty": git("status", "--porcelain", "--untracked-files=no") != "",
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(seconds, 1),
            "machine": machine(),
            "load_before": self._load,
            "other_cores": others if others is None else round(others, 3),
            "figures": {
                name: {key: value for key, value in asdict(figure).items() if value is not None}
                for name, figure in self._figures.items()
            },
            "tables": self._tables,
            "facts": self._facts,
        }
        if self.out:
            write_text(self.out, result_text(result))
            self.say(f"written: {self.out}")
        return result


@dataclass(frozen=True)
class Part:
    """Figures of one case of a measurement: "speedup" of the case "a" is "a.speedup"."""

    measurement: Measurement
    name: str

    def figure(self, name: str, value: Figure | float, unit: str = "") -> Figure:
        return self.measurement.figure(f"{self.name}.{name}", value, unit)

    def value(self, name: str, value: Figure | float, unit: str = "") -> float:
        """Keep a figure; its value."""
        return self.figure(name, value, unit).value


def result_text(result: Mapping[str, Any]) -> str:
    """A results file: every figure, row of a table and record of the facts on a line of its own."""

    def lines(value: Any, margin: str) -> str:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not any(isinstance(one, (dict, list)) for one in inner):
            return json.dumps(value)
        if isinstance(value, dict):
            parts, ends = [f"{json.dumps(key)}: {lines(one, margin + ' ')}" for key, one in value.items()], "{}"
        else:
            parts, ends = [json.dumps(one) for one in value], "[]"  # records
        return ends[0] + ",".join(f"\n{margin} {part}" for part in parts) + f"\n{margin}{ends[1]}"

    return lines(result, "") + "\n"


def options(doc: str | None, rounds: int | None = None, seed: bool = True) -> argparse.ArgumentParser:
    """The parser of a benchmark program with what all of them take; `rounds`: the default, None for no rounds."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="in small, to see that it runs: no measurement")
    parser.add_argument("--out", metavar="FILE", help="results file [benchmarks/results/NAME.json; none with --quick]")
    if rounds:
        parser.add_argument(
            "--rounds", type=counting, default=rounds, help="in which the sides take turns [%(default)s]"
        )
    if seed:
        parser.add_argument("--seed", type=counting, default=1, help="[%(default)s]")
    return parser


def counting(text: str) -> int:
    """An argument of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def named(option: str, text: str, known: Mapping[str, T]) -> list[T]:
    """Those of `known` that the option's text names, in its order. Raises InputError for any other name."""
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{option} {text}: {name!r} is unknown; give some of {', '.join(known)}")
    return [known[name] for name in names]


def trace_lengths(source: str | Path, count: int, longest_prompt: int, longest_output: int, seed: int) -> SampleLengths:
    """Requests drawn from a trace, prompts and outputs each scaled so that their longest is the longest allowed.

    Raises InputError for a trace that is not there or has no lengths of prompts.
    """
    trace = load_lengths(source)
    if trace.prompt_column is None:
        raise InputError(f"{source} has no column of prompt lengths; give a trace that has both")
    (drawn,) = trace.lengths.draw(count, 1, seed)

    def scaled(values: Sequence[int], longest: int) -> tuple[int, ...]:
        return tuple(max(1, math.ceil(value * longest / max(values))) for value in values)

    return SampleLengths(scaled(drawn.prompt, longest_prompt), scaled(drawn.output, longest_output))


def peer_python(option: str, file: str, peer: str) -> str:
    """The Python of a peer's environment. Raises InputError where it is not there."""
    if not Path(file).exists():
        raise InputError(f"{option} {file} is not there; run benchmarks/setup_peers.sh {peer}")
    return file


def machine() -> dict[str, Any]:
    """Facts to read a measurement by."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def machine_cpu_seconds() -> float | None:
    """CPU time that the machine has spent on all programs; None where /proc does not say."""
    try:
        return cpu_seconds()
    except OSError:
        return None


def own_cpu_seconds() -> float:
    """CPU time of this process and of all its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def git(*arguments: str) -> str:
    """What git says of this checkout; "" where there is none."""
    finished = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return finished.stdout.strip()


def command(words: Sequence[str]) -> str:
    """As it was given, but of files elsewhere the name alone: results are read on other machines."""
    return shlex.join([Path(words[0]).name, *(Path(w).name if Path(w).is_absolute() else w for w in words[1:])])
