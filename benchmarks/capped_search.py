"""How near its bound the schedule search comes under a memory cap, on the problems of capped_problems.py.

    python benchmarks/capped_search.py [--sets review,fresh] [--seconds 12] [--only t04w0,r05w0]
    python benchmarks/capped_search.py --exact 40       beside the best that CP-SAT finds in so many seconds
    python benchmarks/capped_search.py --ranks 2        beside ranks that share what they find, for as long each

One process searches one problem after the other, each for so many CPU seconds, so that other programs do not matter.
A gap is how far the makespan is above the bound, or above the optimum where that is proved. Kernels are loaded before.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import asdict, dataclass, replace

from capped_problems import OPTIMA, SETS
from harness import Figure, Measurement, counting, named, options
from schedule_search import Search, launch

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.search import SearchObserver, SearchReport, SearchSettings, search

PROVED = 1e-9  # above the bound: rounding
SOLVED = 0.01  # above the optimum
GOALS = {"median": 0.07, "mean": 0.08, "worst": 0.25}  # gaps above the bound, of the problems of both sets
MOST_BYTES = 2e9
MOST_EXACT = 500  # operations of a problem that CP-SAT is given
QUICK = "t04w0,r09s2"  # one of each set


@dataclass(frozen=True)
class Outcome:
    """What came of one problem."""

    name: str
    operations: int
    bound: Number
    first: Number  # made by rule, before any move
    makespan: Number
    optimum: Number | None
    seconds: float
    beside: Number | None = None  # what CP-SAT or several ranks find

    @property
    def gap(self) -> float:
        return float(self.makespan / self.bound - 1)

    @property
    def to_optimum(self) -> float | None:
        """How far above the proved optimum; None where that is not known."""
        known = self.optimum or (self.bound if self.gap <= PROVED else None)
        return None if known is None else float(self.makespan / known - 1)

    def __str__(self) -> str:
        return f"{self.name:14s} {self.makespan} after {self.seconds:.1f} s, bound {self.bound}, gap {self.gap:.1%}"


def main() -> None:
    arguments = parse_arguments()
    name = "capped_exact" if arguments.exact else "capped_ranks" if arguments.ranks > 1 else "capped_search"
    measurement = Measurement(name, arguments, timed=False)
    measurement.facts(seconds_of_a_search=arguments.seconds)
    search(SETS["review"].problems()["t04w0"](), SearchSettings(iterations=1000))  # loads the kernels
    found: dict[str, list[Outcome]] = {}
    chosen = [(kind, name, make()) for kind, of in arguments.problems.items() for name, make in of.items()]
    if arguments.exact:
        chosen = [(kind, name, problem) for kind, name, problem in chosen if problem.tasks <= MOST_EXACT]
    for number, (kind, name, problem) in enumerate(chosen, start=1):
        outcome = searched(name, problem, arguments.seconds, arguments.seed)
        if arguments.exact:
            outcome = replace(outcome, beside=by_cp_sat(problem, arguments.exact))
        found.setdefault(kind, []).append(outcome)
        measurement.say(f"{number:3d}/{len(chosen)}  {outcome}")
    if arguments.ranks > 1:
        asked = [Search(name, problem, arguments.seed, objective="latency", cpu=True) for _, name, problem in chosen]
        makespans = {outcome.name: outcome.makespan for outcome in launch(asked, measurement)}
        found = {kind: [replace(one, beside=makespans[one.name]) for one in of] for kind, of in found.items()}
    for kind, outcomes in found.items():
        report(measurement, kind, outcomes)
    every = [outcome for outcomes in found.values() for outcome in outcomes]
    if arguments.exact:
        exact_figures(measurement, every)
    elif arguments.ranks > 1:
        rank_figures(measurement, every)
    else:
        figures(measurement, every, arguments.whole)
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--sets", default=",".join(SETS), help="[%(default)s]")
    parser.add_argument("--seconds", type=counting, default=12, help="CPU seconds for each problem [%(default)s]")
    parser.add_argument("--only", metavar="NAME,...", help="these problems alone; no goal then counts")
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--exact", type=counting, metavar="SECONDS", help=f"of CP-SAT, up to {MOST_EXACT} operations")
    beside.add_argument("--ranks", type=counting, default=1, help="of mpirun, beside one [%(default)s]")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.only = 0.3, arguments.only or QUICK
        arguments.exact = arguments.exact and 1
    named("--sets", arguments.sets, SETS)
    every = {kind: SETS[kind].problems() for kind in arguments.sets.split(",")}
    arguments.whole = not arguments.only and set(every) == set(SETS)
    arguments.problems = every
    if arguments.only:
        wanted = set(arguments.only.split(","))
        if unknown := wanted - {name for of in every.values() for name in of}:
            raise InputError(f"--only {arguments.only}: {sorted(unknown)[0]!r} is in none of the sets {arguments.sets}")
        arguments.problems = {kind: {n: make for n, make in of.items() if n in wanted} for kind, of in every.items()}
    return arguments


def searched(name: str, problem: FusionProblem, seconds: float, seed: int) -> Outcome:
    begun, settings = time.process_time(), SearchSettings(time_limit=seconds, seed=seed)
    first: list[Number] = []

    class Watcher(SearchObserver):
        def improved(self, schedule: Schedule, report: SearchReport) -> None:
            first.append(report.makespan)

    _, report = search(problem, settings, observer=Watcher(), clock=time.process_time)
    spent = time.process_time() - begun
    ends = report.makespan, OPTIMA.get(name), round(spent, 2)
    return Outcome(name, problem.tasks, report.lower_bound, first[0], *ends)


def by_cp_sat(problem: FusionProblem, seconds: float) -> Number | None:
    """The least makespan that CP-SAT finds; None where it finds none. Raises InputError without ortools."""
    try:
        from exact_schedules import least_makespan
    except ImportError:
        raise InputError("--exact needs ortools, which is not installed: pip install 'rlhfuse[exact]'") from None
    return least_makespan(problem, seconds=seconds).value


def report(measurement: Measurement, kind: str, outcomes: list[Outcome]) -> None:
    """The table of a set."""
    ranks, exact = measurement.arguments.ranks, measurement.arguments.exact
    beside = [f"CP-SAT {exact} s"] if exact else [f"{ranks} ranks"] if ranks > 1 else []
    rows = [
        [
            one.name,
            f"{one.operations:,}",
            *map(units, (one.bound, one.first, one.makespan)),
            f"{one.gap:.1%}",
            "" if one.to_optimum is None else f"{one.to_optimum:.1%}",
            f"{one.seconds:.1f}",
            *("-" if one.beside is None else units(one.beside) for _ in beside),
        ]
        for one in outcomes
    ]
    head = ("problem", "operations", "bound", "first", "found", "above bound", "above optimum", "CPU s", *beside)
    measurement.table(kind, f"Under a memory cap: problems of the set {kind}", head, rows)
    measurement.facts(**{kind: [asdict(one) for one in outcomes]})
    if not beside:
        for name, value in summary(outcomes).items():
            measurement.figure(f"{kind}.{name}", value)


def units(value: Number) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:,}"


def summary(outcomes: list[Outcome]) -> dict[str, float]:
    gaps = [one.gap for one in outcomes]
    return {"median": statistics.median(gaps), "mean": statistics.fmean(gaps), "worst": max(gaps)}


def figures(measurement: Measurement, outcomes: list[Outcome], whole: bool) -> None:
    """Those of all sets together; goals count where they are `whole`."""
    for name, value in summary(outcomes).items():
        measurement.figure(name, Figure(value).at_most(GOALS[name]) if whole else Figure(value))
    known = [one.to_optimum for one in outcomes if one.to_optimum is not None]
    solved = Figure(sum(gap <= SOLVED for gap in known), f"of {len(known)}")
    measurement.figure("solved", solved.at_least(len(known) - 2) if whole else solved)
    measurement.figure("proved", sum(one.gap <= PROVED for one in outcomes), f"of {len(outcomes)}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    measurement.figure("rss", Figure(peak, "bytes").at_most(MOST_BYTES))


def exact_figures(measurement: Measurement, outcomes: list[Outcome]) -> None:
    """How the search stands beside the best of CP-SAT, which may have found nothing."""
    ratios = [float(one.makespan / one.beside) for one in outcomes if one.beside]
    text = f"of {len(ratios)}"
    within = Figure(sum(ratio <= 1 + SOLVED for ratio in ratios), text)
    measurement.figure("within", within.at_least(len(ratios)))
    measurement.figure("faster", sum(ratio < 1 - PROVED for ratio in ratios), text)
    measurement.figure("worst", max(ratios, default=1.0) - 1)
    measurement.figure("nothing_found", sum(one.beside is None for one in outcomes), f"of {len(outcomes)}")


def rank_figures(measurement: Measurement, outcomes: list[Outcome]) -> None:
    """Gaps of one rank and of several."""
    several = [replace(one, makespan=one.beside) for one in outcomes if one.beside is not None]
    for side, gaps in (("one", summary(outcomes)), ("several", summary(several))):
        for name, value in gaps.items():
            measurement.figure(f"{side}.{name}", value)
    measurement.figure("faster", sum(a.makespan < b.makespan for a, b in zip(several, outcomes)), f"of {len(outcomes)}")


if __name__ == "__main__":
    run_program(main)
