"""Speed of fused training of an actor and a critic beside serial training, on two ranks of one CPU machine.

    python benchmarks/intra_stage.py [--trace trace.json]

Two processes of one thread train two random Llamas over gloo, the actor's stages on ranks 0 and 1, the critic's on 1
and 0. Each side (intra_stage_sides.py) trains one mini-batch in turn, and all must leave the same gradients, bit for
bit. Schedules are made of action times profiled with both ranks busy; what they promise stands beside what is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import Figure, Measurement, named, options, take_turns
from intra_stage_sides import (
    FUSED,
    INPUT,
    MEGATRON,
    MICROSECONDS,
    NO_BARRIER,
    PLAIN,
    RANKS,
    SAME_GRADIENTS,
    SERIAL,
    SIDES,
    SPLIT,
    STEPS,
    WEIGHT,
    WHOLE,
    Case,
    Sizes,
)
from processes import ALLOCATOR, Ranks

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.monitor.trace import Span, save_trace
from rlhfuse.schedule.ir.evaluate import evaluate

PROFILE_CYCLES = 5
QUICK_ROUNDS = 2
GAP_SECONDS = 0.05  # between two runs in the trace
BASELINES = (MEGATRON, SERIAL)  # the headline is against the faster of them

PREDICTED_GOAL = 0.95  # of the predicted speedup
STEPS_GOAL = 0.9  # with optimizer steps, of what the schedule promises without
LARGE = 1.04  # a split that lowers the bound by so much has to be faster
OVERHEAD_GOAL = 60.0  # microseconds of the executor's own Python per instruction
SHARE_GOAL = 0.03  # of a rank's time

FULL = (Sizes("1:1", (8, 8), 512, 1376, 512, 3, 16, 80), Sizes("2.5:1", (10, 4), 512, 1376, 512, 3, 16, 80))
QUICK = (Sizes("1:1", (2, 2), 128, 352, 256, 2, 8, 24), Sizes("2.5:1", (5, 2), 128, 352, 256, 2, 8, 24))


@dataclass(frozen=True)
class Round:
    """One run of a side over all ranks, as the ranks told it."""

    ranks: Sequence[Mapping[str, Any]]

    @property
    def begin(self) -> float:
        return min(rank["start"] for rank in self.ranks)

    @property
    def seconds(self) -> float:
        return max(rank["end"] for rank in self.ranks) - self.begin


def spent(rank: Mapping[str, Any], what: str, kinds: Sequence[str] = ()) -> tuple[float, int]:
    """Seconds that a rank's executor spent on `what`, and instructions; of all kinds or of some."""
    rows = [row for row in rank["spent"] if not kinds or row["kind"] in kinds]
    return sum(row[what] for row in rows), sum(row["count"] for row in rows)


def main() -> None:
    arguments = parse_arguments()
    measurement, spans = Measurement("intra_stage", arguments), []
    tables: dict[str, list[list[str]]] = {"speed": [], "split": [], "steps": []}
    for sizes in named("--sizes", arguments.sizes, {one.name: one for one in (QUICK if arguments.quick else FULL)}):
        made = {"sizes": asdict(sizes), "seed": arguments.seed}
        with Ranks("intra_stage_rank:TrainingRank", RANKS, ALLOCATOR, **made) as ranks:
            for microbatches in arguments.microbatches:
                for name, row in measure(sizes, microbatches, ranks, measurement, spans).items():
                    tables[name].append([sizes.name, str(microbatches), *row])
    promise = ("speedup", "predicted", "of it")
    head = ("models", "M", "Megatron 1F1B", "serial", "no barrier", "fused", *promise, "bound")
    measurement.table("speed", "Fused beside serial training", head, tables["speed"])
    head = ("models", "M", "split", *promise, "bound", "over fused", "predicted", "bound", "B + W over whole")
    measurement.table("split", "Fused with split backwards", head, tables["split"])
    head = ("models", "M", "serial", "fused", *promise, "of schedule", "split", *promise, "of schedule")
    measurement.table("steps", "With optimizer steps", head, tables["steps"])
    if arguments.trace:
        save_trace(spans, arguments.trace)
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=11)
    parser.add_argument("--sizes", default="1:1,2.5:1", help="layers of the actor over those of the critic")
    parser.add_argument("--microbatches", default="2,4,8", help="such as 2,4")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace: predicted above, measured below")
    arguments = parser.parse_args()
    words = arguments.microbatches.split(",")
    for word in words:
        if not word.strip().isdigit() or int(word) < 2:
            raise InputError(f"--microbatches {arguments.microbatches}: {word!r} is not a number of at least 2")
    arguments.microbatches = [int(word) for word in words]
    arguments.rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    return arguments


def measure(
    sizes: Sizes, microbatches: int, ranks: Ranks, measurement: Measurement, spans: list[Span]
) -> dict[str, list[str]]:
    """Profile, make the schedules, let the sides take turns; adds to `spans` and returns a row of each table."""
    name = f"{sizes.name.replace(':', 'to').replace('.', '_')}_m{microbatches}"
    ranks.ask("load", microbatches, {})
    profiles = ranks.ask("profile", PROFILE_CYCLES)
    times = {key: statistics.median(values) for answer in profiles for key, values in answer.items()}
    case = Case.of(microbatches, times, measurement.arguments.seed)
    texts = {
        side: [tuple(phase[rank].text() for rank in range(RANKS)) for phase in case.phases(side)]
        for side in SIDES
        if side != MEGATRON
    }
    ranks.ask("load", microbatches, texts)
    digests: dict[str, Any] = {}

    def side(name: str, number: int) -> Round:
        run = Round(ranks.ask("run", name))
        if number < 0:
            digests[name] = ranks.ask("digest")
        return run

    sides = {side_name: lambda number, side_name=side_name: side(side_name, number) for side_name in SIDES}
    rounds = take_turns(sides, measurement.arguments.rounds, warm_up=True)
    if not all(digests[one] == digests[group[0]] for group in SAME_GRADIENTS for one in group):
        raise RuntimeError(f"{name}: the sides left different gradients")
    add_executor(name, measurement, rounds[FUSED])
    add_details(name, measurement, case, rounds)
    spans += trace_spans(name, case, rounds, max((span.end_seconds for span in spans), default=0.0))
    return Speeds(name, measurement, case, rounds).rows()


class Speeds:
    """Speedups of a case beside what its schedules promise: figures, and rows of the tables."""

    def __init__(self, name: str, measurement: Measurement, case: Case, rounds: Mapping[str, Sequence[Round]]) -> None:
        self._name, self._measurement, self._case = name, measurement, case
        self._seconds = {side: [run.seconds for run in runs] for side, runs in rounds.items()}
        self._medians = {side: self._figure(side, Figure.of(values, "s")) for side, values in self._seconds.items()}
        self._predicted = {side: self._figure(f"{side}_predicted", case.predicted(side), "s") for side in SIDES}
        self._baseline = min(BASELINES, key=self._medians.__getitem__)

    def _figure(self, name: str, value: Figure | float, unit: str = "") -> float:
        return self._measurement.figure(f"{self._name}.{name}", value, unit).value

    def _speedup(self, name: str, slow: str, fast: str, goal: float = PREDICTED_GOAL) -> Iterator[str]:
        """Cells: measured, predicted, their quotient."""
        head = Figure.ratio(self._seconds[slow], self._seconds[fast])
        self._figure(name, head)
        yield head.text()
        predicted = self._figure(f"{name}.predicted", self._predicted[slow] / self._predicted[fast], "x")
        yield f"{predicted:.2f}"
        yield f"{self._figure(f'{name}.of_predicted', Figure(head.value / predicted).at_least(goal)):.3f}"

    def rows(self) -> dict[str, list[str]]:
        baseline, seconds = self._baseline, {side: f"{value:.3f} s" for side, value in self._medians.items()}
        for side in (*BASELINES, NO_BARRIER):
            list(self._speedup(f"speedup_over_{side}", side, FUSED))
        speed = [*(seconds[side] for side in PLAIN[:-1]), *self._speedup("speedup", baseline, FUSED)]
        speed.append(self._bound(FUSED))
        split = [seconds[SPLIT], *self._speedup("split_speedup", baseline, SPLIT), self._bound(SPLIT)]
        return {"speed": speed, "split": split + self._over_fused(), "steps": self._with_steps(seconds)}

    def _bound(self, side: str) -> str:
        return f"{self._figure(f'{side}_bound', self._predicted[SERIAL] / self._case.bounds[side], 'x'):.2f}"

    def _over_fused(self) -> list[str]:
        """Cells: measured, predicted, of the bounds; what a backward in two parts takes of a whole one."""
        bound = self._figure("split_over_fused.bound", self._case.bounds[FUSED] / self._case.bounds[SPLIT], "x")
        gain = Figure.ratio(self._seconds[FUSED], self._seconds[SPLIT])
        self._figure("split_over_fused", gain.at_least(1.0) if bound > LARGE else gain)
        predicted = self._figure("split_over_fused.predicted", self._predicted[FUSED] / self._predicted[SPLIT], "x")
        parts, whole = (
            sum(seconds for (_, _, what), seconds in self._case.times.items() if what in kinds)
            for kinds in ((INPUT, WEIGHT), (WHOLE,))
        )
        overhead = self._figure("split_backward", parts / whole, "x")
        return [gain.text(), f"{predicted:.2f}", f"{bound:.2f}", f"{overhead:.2f}"]

    def _with_steps(self, seconds: Mapping[str, str]) -> list[str]:
        """Cells: serial; of both fused sides measured, predicted with the steps' seconds, of what is without."""
        cells = [seconds[STEPS[SERIAL]]]
        for side in (FUSED, SPLIT):
            name = f"{side}_with_steps"
            cells += [seconds[STEPS[side]], *self._speedup(name, STEPS[SERIAL], STEPS[side], STEPS_GOAL)]
            measured = Figure.ratio(self._seconds[STEPS[SERIAL]], self._seconds[STEPS[side]]).value
            promise = self._predicted[SERIAL] / self._predicted[side]
            share = self._figure(f"{name}.of_schedule", Figure(measured / promise).at_least(STEPS_GOAL))
            cells.append(f"{share:.3f}")
        return cells


def add_executor(name: str, measurement: Measurement, rounds: Sequence[Round]) -> None:
    """The executor's own time in fused runs, without stages and transport: medians over all ranks' runs."""
    runs = [rank for run in rounds for rank in run.ranks]

    def per_instruction(what: str, kinds: Sequence[str] = ()) -> float:
        each = (spent(rank, what, kinds) for rank in runs)
        return statistics.median(MICROSECONDS * seconds / count for seconds, count in each)

    own = Figure(per_instruction("overhead"), "us").at_most(OVERHEAD_GOAL)
    measurement.figure(f"{name}.instruction", own)
    measurement.figure(f"{name}.send", per_instruction("transport", ("SF", "SB")), "us")
    measurement.figure(f"{name}.receive", per_instruction("transport", ("RF", "RB")), "us")
    shares = [spent(rank, "overhead")[0] / (rank["end"] - rank["start"]) for rank in runs]
    measurement.figure(f"{name}.share", Figure(statistics.median(shares)).at_most(SHARE_GOAL))


def add_details(name: str, measurement: Measurement, case: Case, rounds: Mapping[str, Sequence[Round]]) -> None:
    """Actions beside the profile that the schedules were made of; live micro-batches must be as scheduled."""
    shown = (SERIAL, *case.schedules, STEPS[FUSED], STEPS[SPLIT])
    seconds = {"profile": case.times} | {side: action_seconds(side, rounds[side]) for side in shown}
    texts = {key: f"{key[0]}:{key[1]}{key[2]}" for key in sorted(case.times)}
    actions = {text: {side: each[key] for side, each in seconds.items() if key in each} for key, text in texts.items()}
    measurement.facts(**{f"{name}.action_seconds": actions})
    for side in (FUSED, SPLIT):
        peaks = map(int, evaluate(case.schedules[side]).node_peak_memory)  # an activation counts 1
        for rank, expected in enumerate(peaks):
            live = max(run.ranks[rank]["peak_live"] for run in rounds[side])
            assert live == expected, (
                f"{side}, rank {rank}: kept {live} micro-batches for their backward, not {expected}"
            )


def action_seconds(side: str, rounds: Sequence[Round]) -> dict[tuple[str, int, str], float]:
    """Medians, by what is profiled."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for run in rounds:
        for rank in run.ranks:
            for _, (model, stage, kind), start, end in rank["actions"]:
                what = INPUT if kind == WHOLE and SPLIT in side else kind
                found.setdefault((model, stage, what), []).append(end - start)
    return {key: statistics.median(values) for key, values in found.items()}


def trace_spans(name: str, case: Case, rounds: Mapping[str, Sequence[Round]], begin: float) -> list[Span]:
    """The median runs of every schedule, predicted and measured, one after the other."""
    spans: list[Span] = []
    for side, schedule in case.schedules.items():
        run = sorted(rounds[side], key=lambda run: run.seconds)[len(rounds[side]) // 2]
        facts, shift, timeline = {"case": name, "side": side}, begin - run.begin, evaluate(schedule)
        for node, order in enumerate(schedule.orders):
            for action, first, last in zip(order, timeline.starts[node], timeline.ends[node]):
                ends = begin + first / MICROSECONDS, begin + last / MICROSECONDS
                spans.append(Span(str(action), f"{action.pipeline} {action.kind}", node, *ends, "predicted", facts))
        for number, rank in enumerate(run.ranks):
            for text, (model, _, kind), first, last in rank["actions"]:
                ends = shift + first, shift + last
                spans.append(Span(text, f"{model} {kind}", number, *ends, "measured", facts))
        begin = max(span.end_seconds for span in spans) + GAP_SECONDS
    return spans


if __name__ == "__main__":
    run_program(main)
