"""Speed of fused training of an actor and a critic beside serial training, on two ranks of one CPU machine.

    python benchmarks/intra_stage.py [--sizes 1:1] [--microbatches 2,4]

Two processes of one thread train two random Llamas over gloo, the actor's stages on ranks 0 and 1, the critic's on 1
and 0. Each side (intra_stage_sides.py) trains one mini-batch in turn, and all must leave the same gradients, bit for
bit. Schedules are made of action times profiled with both ranks busy; what they promise stands beside what is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from harness import Figure, Measurement, Part, named, options, take_turns
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
from rlhfuse.schedule.ir.evaluate import evaluate

PROFILE_CYCLES = 5
QUICK_ROUNDS = 2
BASELINES = (MEGATRON, SERIAL)  # the headline is against the faster of them

PREDICTED_GOAL = 0.95  # of the predicted speedup
STEPS_GOAL = 0.9  # with optimizer steps, of what the schedule promises without
LARGE = 1.04  # a split that lowers the bound by so much has to be faster
OVERHEAD_GOAL = 60.0  # microseconds of the executor's own Python per instruction
SHARE_GOAL = 0.03  # of a rank's time

FULL = (Sizes("1:1", (8, 8), 512, 1376, 512, 3, 16, 80), Sizes("2.5:1", (10, 4), 512, 1376, 512, 3, 16, 80))
QUICK = (Sizes("1:1", (2, 2), 128, 352, 256, 2, 8, 24), Sizes("2.5:1", (5, 2), 128, 352, 256, 2, 8, 24))

Answers = Sequence[Mapping[str, Any]]  # of a run's ranks


def seconds_of(answers: Answers) -> float:
    """Seconds of a run over all ranks."""
    return max(rank["end"] for rank in answers) - min(rank["start"] for rank in answers)


def main() -> None:
    arguments = parse_arguments()
    measurement = Measurement("intra_stage", arguments)
    tables: dict[str, list[list[str]]] = {"speed": [], "split": [], "steps": []}
    for sizes in named("--sizes", arguments.sizes, {one.name: one for one in (QUICK if arguments.quick else FULL)}):
        made = {"sizes": asdict(sizes), "seed": arguments.seed}
        with Ranks("intra_stage_rank:TrainingRank", RANKS, ALLOCATOR, **made) as ranks:
            for microbatches in arguments.microbatches:
                for name, row in measure(sizes, microbatches, ranks, measurement).items():
                    tables[name].append([sizes.name, str(microbatches), *row])
    promise = ("speedup", "predicted", "of it")
    head = ("models", "M", "Megatron 1F1B", "serial", "no barrier", "fused", *promise, "bound")
    measurement.table("speed", "Fused beside serial training", head, tables["speed"])
    head = ("models", "M", "split", *promise, "bound", "over fused", "predicted", "bound", "B + W over whole")
    measurement.table("split", "Fused with split backwards", head, tables["split"])
    head = ("models", "M", "serial", "fused", *promise, "of schedule", "split", *promise, "of schedule")
    measurement.table("steps", "With optimizer steps", head, tables["steps"])
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=11)
    parser.add_argument("--sizes", default="1:1,2.5:1", help="layers of the actor over those of the critic")
    parser.add_argument("--microbatches", default="2,4,8", help="such as 2,4")
    arguments = parser.parse_args()
    words = arguments.microbatches.split(",")
    for word in words:
        if not word.strip().isdigit() or int(word) < 2:
            raise InputError(f"--microbatches {arguments.microbatches}: {word!r} is not a number of at least 2")
    arguments.microbatches = [int(word) for word in words]
    arguments.rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    return arguments


def measure(sizes: Sizes, microbatches: int, ranks: Ranks, measurement: Measurement) -> dict[str, list[str]]:
    """Profile, make the schedules, let the sides take turns; a row of each table."""
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

    def run(name: str, number: int) -> list[dict[str, Any]]:
        answers = ranks.ask("run", name)
        if number < 0:
            digests[name] = ranks.ask("digest")
        return answers

    sides = {name: partial(run, name) for name in SIDES}
    rounds = take_turns(sides, measurement.arguments.rounds, warm_up=True)
    if not all(digests[one] == digests[group[0]] for group in SAME_GRADIENTS for one in group):
        raise RuntimeError(f"{name}: the sides left different gradients")
    check_peaks(case, rounds)
    return Speeds(measurement.part(name), case, rounds).rows()


def check_peaks(case: Case, rounds: Mapping[str, Sequence[Answers]]) -> None:
    """Live micro-batches must be as scheduled."""
    for side in (FUSED, SPLIT):
        peaks = map(int, evaluate(case.schedules[side]).node_peak_memory)  # an activation counts 1
        for rank, expected in enumerate(peaks):
            live = max(answers[rank]["peak_live"] for answers in rounds[side])
            assert live == expected, f"{side}, rank {rank}: kept {live} micro-batches, not {expected}"


class Speeds:
    """Speedups of a case beside what its schedules promise: figures, and rows of the tables."""

    def __init__(self, figures: Part, case: Case, rounds: Mapping[str, Sequence[Answers]]) -> None:
        self._figure, self._case = figures.value, case
        self._seconds = {side: [seconds_of(answers) for answers in runs] for side, runs in rounds.items()}
        self._medians = {side: self._figure(side, Figure.of(values, "s")) for side, values in self._seconds.items()}
        self._predicted = {side: self._figure(f"{side}_predicted", case.predicted(side), "s") for side in SIDES}
        self._baseline = min(BASELINES, key=self._medians.__getitem__)
        self._executor([rank for answers in rounds[FUSED] for rank in answers])

    def _executor(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """The executor's own time in fused runs, without stages and transport: medians over all ranks' runs."""
        own = statistics.median(MICROSECONDS * rank["overhead"] / rank["instructions"] for rank in runs)
        share = statistics.median(rank["overhead"] / (rank["end"] - rank["start"]) for rank in runs)
        self._figure("instruction", Figure(own, "us").at_most(OVERHEAD_GOAL))
        self._figure("share", Figure(share).at_most(SHARE_GOAL))

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


if __name__ == "__main__":
    run_program(main)
