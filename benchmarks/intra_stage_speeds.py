"""Speeds of the intra-stage benchmark's sides beside what their schedules promise: figures, and rows of the tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness import Figure, Part
from intra_stage_sides import (
    FUSED,
    INPUT,
    MEGATRON,
    MICROSECONDS,
    NO_BARRIER,
    PLAIN,
    SERIAL,
    SORTED,
    SPLIT,
    STEPS,
    UNSORTED,
    WEIGHT,
    WHOLE,
    Case,
    Turns,
)

BASELINES = (MEGATRON, SERIAL)  # the headline is against the faster of them

PREDICTED_GOAL = 0.95  # of the predicted speedup
STEPS_GOAL = 0.9  # with optimizer steps, of what the schedule promises without
LARGE = 1.04  # a split that lowers the bound by so much has to be faster
OVERHEAD_GOAL = 60.0  # microseconds of the executor's own Python per instruction
SHARE_GOAL = 0.03  # of a rank's time

Answers = Sequence[Mapping[str, Any]]  # of a run's ranks


def seconds_of(answers: Answers) -> float:
    """Seconds of a run over all ranks."""
    return max(rank["end"] for rank in answers) - min(rank["start"] for rank in answers)


class Speeds:
    """Seconds of a case's turns beside what its schedules promise, as figures."""

    def __init__(self, figures: Part, case: Case, turns: Turns, rounds: Mapping[str, Sequence[Answers]]) -> None:
        self._figure, self._case, self._turns, self._rounds = figures.value, case, turns, rounds
        self._seconds = {name: [seconds_of(answers) for answers in runs] for name, runs in rounds.items()}
        self._medians = {name: self._figure(name, Figure.of(values, "s")) for name, values in self._seconds.items()}
        self._predicted = {
            name: self._figure(f"{name}_predicted", case.predicted(*side), "s") for name, side in turns.items()
        }

    def _speedup(self, name: str, slow: str, fast: str, goal: float = PREDICTED_GOAL) -> Iterator[str]:
        """Cells: measured, predicted, their quotient."""
        head = Figure.ratio(self._seconds[slow], self._seconds[fast])
        self._figure(name, head)
        yield head.text()
        predicted = self._figure(f"{name}.predicted", self._predicted[slow] / self._predicted[fast], "x")
        yield f"{predicted:.2f}"
        yield f"{self._figure(f'{name}.of_predicted', Figure(head.value / predicted).at_least(goal)):.3f}"


class UnequalSpeeds(Speeds):
    """Serial and fused training, sorted and unsorted: what fusion brings, and what the order does."""

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        for order in (SORTED, UNSORTED):
            names = [f"{side}_{order}" for side in (SERIAL, FUSED)]
            cells = [cell for name in names for cell in (f"{self._medians[name]:.3f} s", self._planned(name))]
            yield "unequal", [order, *cells, *self._speedup(f"fusion_{order}", *names)]
        gains = (self._speedup(f"order_{side}", f"{side}_{UNSORTED}", f"{side}_{SORTED}") for side in (SERIAL, FUSED))
        yield "order", [cell for gain in gains for cell in gain]

    def _planned(self, name: str) -> str:
        """Cell: seconds with equal micro-batches, as a plan has them, over those with each one's own."""
        side, _ = self._turns[name]
        planned = self._case.planned(side) / self._predicted[name]
        return f"{self._figure(f'{name}.planned', planned, 'x'):.3f}"


class EqualSpeeds(Speeds):
    """All sides, with equal micro-batches."""

    def _executor(self) -> None:
        """The executor's own time in fused runs, without stages and transport: medians over all ranks' runs."""
        runs = [rank for answers in self._rounds[FUSED] for rank in answers]
        own = statistics.median(MICROSECONDS * rank["overhead"] / rank["instructions"] for rank in runs)
        share = statistics.median(rank["overhead"] / (rank["end"] - rank["start"]) for rank in runs)
        self._figure("instruction", Figure(own, "us").at_most(OVERHEAD_GOAL))
        self._figure("share", Figure(share).at_most(SHARE_GOAL))

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        self._executor()
        baseline = min(BASELINES, key=self._medians.__getitem__)
        seconds = {side: f"{value:.3f} s" for side, value in self._medians.items()}
        for side in (*BASELINES, NO_BARRIER):
            list(self._speedup(f"speedup_over_{side}", side, FUSED))
        speed = [*(seconds[side] for side in PLAIN[:-1]), *self._speedup("speedup", baseline, FUSED)]
        speed.append(self._bound(FUSED))
        split = [seconds[SPLIT], *self._speedup("split_speedup", baseline, SPLIT), self._bound(SPLIT)]
        yield from (("speed", speed), ("split", split + self._over_fused()), ("steps", self._with_steps(seconds)))

    def _bound(self, side: str) -> str:
        return f"{self._figure(f'{side}_bound', self._predicted[SERIAL] / self._case.bounds[side], 'x'):.2f}"

    def _over_fused(self) -> list[str]:
        """Cells: measured, predicted, of the bounds; what a backward in two parts takes of a whole one."""
        bound = self._figure("split_over_fused.bound", self._case.bounds[FUSED] / self._case.bounds[SPLIT], "x")
        gain = Figure.ratio(self._seconds[FUSED], self._seconds[SPLIT])
        self._figure("split_over_fused", gain.at_least(1.0) if bound > LARGE else gain)
        predicted = self._figure("split_over_fused.predicted", self._predicted[FUSED] / self._predicted[SPLIT], "x")
        parts, whole = (
            sum(seconds[0] for (_, _, what), seconds in self._case.times.items() if what in kinds)
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
