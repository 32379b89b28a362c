"""Fused and serial training of the paper's Table 3 on paced ranks, beside what their programs predict."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paced_rank  # noqa: F401  # forked ranks have what is imported here
from harness import Figure, Measurement, named
from paced_rank import Prices, Stages
from processes import ALLOCATOR, Ranks

from rlhfuse.costs.machine import Host
from rlhfuse.monitor.pace import MOST_CPU, MOST_LATE, PaceStats
from rlhfuse.schedule.ir.action import Action
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.tools.run_report.program_times import makespan, program_times

MODELS = ("actor", "critic")
FUSED, SERIAL = "fused", "serial"
REDUCTION, STEP = 1, 2  # forwards that a stage's reduction and a model's step last
SHORT_SECONDS, NEAR, NEAR_SHORT = 0.02, 0.05, 0.08  # goals of measured over predicted, by the shortest action
SEARCH_SECONDS = 5.0
Phase = dict[int, Program]


@dataclass(frozen=True)
class Setting:
    """A row of Table 3 or like one: layouts, micro-batches, ticks of a forward (backwards take two), and what is
    printed as speed-up of its schedule, None for a row that is not in the table."""

    name: str
    stages: Stages
    forward: tuple[int, int]
    tick_seconds: float
    printed: float | None

    splits: bool = False  # measured with split backwards too, of twice the seconds


def _stages(actor: int, critic: int, microbatches: int) -> Stages:
    return Stages(f"d1t1p{actor}", f"d{actor // critic}t1p{critic}", microbatches)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("8/8x8", _stages(8, 8, 8), (5, 2), 0.010, 1.40),
        Setting("8/8x8 short", _stages(8, 8, 8), (5, 2), 0.005, 1.40),
        Setting("8/4x16", _stages(8, 4, 16), (5, 4), 0.010, 1.30),
        Setting("11/11x11", _stages(11, 11, 11), (2, 1), 0.020, None),
        Setting("16/8x16", _stages(16, 8, 16), (2, 2), 0.020, 1.48, splits=True),
        Setting("16/16x16", _stages(16, 16, 16), (2, 1), 0.020, 1.50, splits=True),
        Setting("32/32x32", _stages(32, 32, 32), (2, 1), 0.040, None),
    )
}
QUICK = Setting("2/2x4", _stages(2, 2, 4), (2, 1), 0.005, None, splits=True)


@dataclass(frozen=True)
class Run:
    """One run of a side: seconds, and what says whether it is evidence."""

    seconds: float
    predicted: float
    cpu_share: float  # of the machine's cores, by all programs
    late_share: float
    lateness: float

    @staticmethod
    def of(answers: Sequence[Mapping[str, Any]], predicted: float, seconds: float | None = None) -> Run:
        """What all ranks answered; `seconds`: in place of those from the first's start to the last's end."""
        begin, end = min(one["start"] for one in answers), max(one["end"] for one in answers)
        stats = [PaceStats(*one["stats"]) for one in answers]
        pieces = sum(one.pieces for one in stats)
        machine = max(one.machine_seconds for one in stats) / (end - begin) / Host.here().cores
        late = sum(one.late for one in stats) / pieces
        return Run(seconds or end - begin, predicted, machine, late, max(one.lateness for one in stats))

    @property
    def is_evidence(self) -> bool:
        return self.cpu_share <= MOST_CPU and self.late_share <= MOST_LATE


class Case:
    """One setting with whole or split backwards: what each side runs, and seconds of it by its programs."""

    def __init__(self, setting: Setting, split: bool, seed: int) -> None:
        self.setting, self.split = setting, split
        found, _ = search(self._problem(split), SearchSettings(time_limit=SEARCH_SECONDS, seed=seed))
        self._schedules = {FUSED: found, SERIAL: serial_1f1b(self._problem(False))}

    def _problem(self, split: bool) -> FusionProblem:
        """In microseconds; an activation counts 1."""
        prices, layouts = self.prices(FUSED if split else SERIAL), self.setting.stages.layouts

        def costs(model: str) -> StageCosts:
            every = (1,) * layouts[model].pp
            times = {kind: tuple(round(1e6 * prices[model, kind]) * one for one in every) for kind in ("F", "B", "W")}
            return StageCosts(times["F"], times["B"], every, times["W"] if split else None)

        return fused_problem(layouts, self.setting.stages.microbatches, {model: costs(model) for model in layouts})

    def prices(self, side: str) -> Prices:
        """Seconds by model and kind; parts of a split backward last as long as a forward each."""
        found, split = {}, self.split and side == FUSED
        counts = {"F": 1, "B": 1 if split else 2, "W": 1, "RG": REDUCTION, "ST": STEP}
        for model, ticks in zip(MODELS, self.setting.forward):
            unit = ticks * self.setting.tick_seconds * (2 if self.split else 1)
            found |= {(model, kind): count * unit for kind, count in counts.items()}
        return found

    @property
    def shortest(self) -> float:
        return min(self.prices(FUSED).values())

    def phases(self, side: str) -> list[Phase]:
        """Serial: the actor with its step, a barrier, the critic with its own."""
        programs = lower(self._schedules[side], self.setting.stages.ranks)
        if side == FUSED:
            return [dict(programs)]

        def of(model: str) -> Phase:
            own = {rank: [i for i in one.instructions if model_of(i.action) == model] for rank, one in programs.items()}
            return {rank: Program(rank, tuple(instructions)) for rank, instructions in own.items()}

        return [of(model) for model in MODELS]

    def predicted(self, side: str) -> float:
        prices, ranks = self.prices(side), self.setting.stages.ranks

        def seconds(action: Action) -> float:
            return prices[model_of(action), str(action.kind)]

        return sum(makespan(program_times(phase, ranks, seconds)) for phase in self.phases(side))


def train(arguments: argparse.Namespace) -> None:
    """All settings, whole and split, every seed its own schedules."""
    settings = named("--only", arguments.only, SETTINGS) if arguments.only else list(SETTINGS.values())
    if arguments.quick:
        settings, arguments.rounds = [QUICK], 1
    measurement, rows = Measurement("paced_training", arguments), []
    for setting in settings:
        for split in (False, True) if setting.splits else (False,):
            cases = [Case(setting, split, seed) for seed in range(1, arguments.rounds + 1)]
            rows.append(measure(setting, split, cases, measurement))
    columns = ("stages, micro-batches", "backwards", "shortest", "fused, predicted", "measured over it")
    columns += ("serial, predicted", "measured over it", "gain", "predicted", "printed")
    columns += ("CPU", "late", "lateness", "evidence")
    measurement.table("training", "Fused and serial training of paced stages, with reductions and steps", columns, rows)
    measurement.finish()


def measure(setting: Setting, split: bool, cases: Sequence[Case], measurement: Measurement) -> list[str]:
    """Both sides of every case in turns, after one round that warms up; a row."""
    stages = (setting.stages.actor, setting.stages.critic, setting.stages.microbatches)
    size, digests = setting.stages.ranks.size, set()
    runs: dict[str, list[Run]] = {FUSED: [], SERIAL: []}
    with Ranks("paced_rank:PacedStages", size, ALLOCATOR, fork=True, stages=stages) as ranks:
        for number, case in enumerate(cases):
            texts = {
                side: [[phase[rank].text() for rank in range(size)] for phase in case.phases(side)] for side in runs
            }
            ranks.ask("load", texts, {side: case.prices(side) for side in runs})

            def run(side: str, case: Case = case) -> Run:
                return Run.of(ranks.ask("run", side), case.predicted(side))

            for side in runs:
                if not number:
                    run(side)
            for side in (FUSED, SERIAL) if number % 2 else (SERIAL, FUSED):
                runs[side].append(run(side))
                digests.add(tuple(ranks.ask("digest")))
    if len(digests) != 1:
        raise RuntimeError(f"{setting.name}: fused and serial left different gradients")
    return row(setting, cases[0], runs, measurement)


def row(setting: Setting, case: Case, runs: Mapping[str, Sequence[Run]], measurement: Measurement) -> list[str]:
    name = f"{setting.name.replace('/', '_').replace(' ', '_')}{'_split' if case.split else ''}"
    figures, goal = measurement.part(name), 1 + (NEAR if case.shortest >= SHORT_SECONDS else NEAR_SHORT)
    every = [run for side in runs.values() for run in side]
    over = {
        side: figures.figure(f"{side}.over_predicted", Figure.of([run.seconds / run.predicted for run in mine], "x"))
        for side, mine in runs.items()
    }
    figures.figure("fused.over_predicted", over[FUSED].at_most(goal))
    gain = figures.figure("gain", Figure.ratio(*([run.seconds for run in runs[side]] for side in (SERIAL, FUSED))))
    promised = figures.value("gain.predicted", Figure.ratio(*([r.predicted for r in runs[s]] for s in (SERIAL, FUSED))))
    cpu = figures.figure("cpu", Figure.of([run.cpu_share for run in every]))
    late, lateness = max(run.late_share for run in every), max(run.lateness for run in every)
    figures.figure("late", late)
    figures.figure("lateness", lateness, "s")
    evidence = sum(run.is_evidence for run in every)
    printed = f"{setting.printed:.2f}" if setting.printed and not case.split else ""
    seconds = {side: f"{statistics.median(run.predicted for run in mine):.2f} s" for side, mine in runs.items()}
    sides = [text for side in (FUSED, SERIAL) for text in (seconds[side], over[side].text(".3f"))]
    ends = [gain.text(), f"{promised:.2f}", printed, f"{cpu.most:.0%}", f"{late:.2%}", f"{1e3 * lateness:.0f} ms"]
    kind = "split" if case.split else "whole"
    return [setting.name, kind, f"{1e3 * case.shortest:.0f} ms", *sides, *ends, f"{evidence} of {len(every)}"]


def model_of(action: Action) -> str:
    return action.pipeline.partition(".")[0]
