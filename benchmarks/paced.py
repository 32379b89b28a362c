"""The paper's gains on paced ranks: the real program, of tiny models whose work lasts as long as large ones' would.

    python benchmarks/paced.py training [--only 16/8x16] [--rounds 3]
    python benchmarks/paced.py generation [--traces arxiv,azure,mooncake]
    python benchmarks/paced.py iterations [--cells 33B/13B:P] [--continue FILE]

Times are no measurement of hardware. They show whether overlap that is predicted is reached by executors, scheduler,
queue, migration and messages as they are, where nothing but work waits. Each row says how much CPU was used and how
much was late; one that is no evidence is marked. `training` forks 8 to 32 ranks and runs schedules of the paper's
Table 3; `generation` has 16 instances; `iterations` starts tools/train_ppo.py as users do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import paced_rank  # noqa: F401  # forked ranks have what is imported here
from harness import DATA, Figure, Measurement, named, options, trace_lengths
from inter_stage import ELEMENT_BYTES, Sizes
from paced_costs import paced_cost
from paced_iterations import iterate
from paced_rank import Prices, Stages
from processes import ALLOCATOR, Ranks
from run_report.timeline import simulate_gen_infer

from rlhfuse.costs.machine import Host
from rlhfuse.monitor.pace import MOST_CPU, MOST_LATE, PaceStats
from rlhfuse.schedule.ir.action import Action
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.simulator.threshold import sweep_threshold
from rlhfuse.tools.program import run_program
from rlhfuse.tools.run_report.program_times import makespan, program_times

MODELS = ("actor", "critic")
FUSED, SERIAL = "fused", "serial"
REDUCTION, STEP = 1, 2  # forwards that a stage's reduction and a model's step last
SHORT_SECONDS, NEAR, NEAR_SHORT = 0.02, 0.05, 0.08  # goals of measured over predicted, by the shortest action
SEARCH_SECONDS = 5.0
Phase = dict[int, Program]
INSTANCES, SEQUENCES = 16, 16  # sequences of an instance
PAIR, STRETCH = ("33B", "65B"), 8.0
MAX_PROMPT, MAX_OUTPUT = 512, 512
TRACES = {
    "arxiv": DATA / "traces" / "arxiv_llama2tok.csv",
    "azure": DATA / "traces" / "azure2023_conv.csv",
    "mooncake": DATA / "traces" / "mooncake_conversation.jsonl",
}
PERCENTS, QUICK_PERCENTS = (0, 5, 10, 20, 30, 45, 60, 80), (0, 30)
CHOICE_GOAL = 1.03  # chosen over the best


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


class TrainingCase:
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
            cases = [TrainingCase(setting, split, seed) for seed in range(1, arguments.rounds + 1)]
            rows.append(measure_cases(cases, measurement))
    columns = ("stages, micro-batches", "backwards", "shortest", "fused, predicted", "measured over it")
    columns += ("serial, predicted", "measured over it", "gain", "predicted", "printed")
    columns += ("CPU", "late", "lateness", "evidence")
    measurement.table("training", "Fused and serial training of paced stages, with reductions and steps", columns, rows)
    measurement.finish()


def measure_cases(cases: Sequence[TrainingCase], measurement: Measurement) -> list[str]:
    """Both sides of every case in turns, after one round that warms up; a row."""
    setting = cases[0].setting
    stages = (setting.stages.actor, setting.stages.critic, setting.stages.microbatches)
    size, digests = setting.stages.ranks.size, set()
    runs: dict[str, list[Run]] = {FUSED: [], SERIAL: []}
    with Ranks("paced_rank:PacedStages", size, ALLOCATOR, fork=True, stages=stages) as ranks:
        for number, case in enumerate(cases):
            texts = {
                side: [[phase[rank].text() for rank in range(size)] for phase in case.phases(side)] for side in runs
            }
            ranks.ask("load", texts, {side: case.prices(side) for side in runs})

            def run(side: str, case: TrainingCase = case) -> Run:
                return Run.of(ranks.ask("run", side), case.predicted(side))

            for side in runs:
                if not number:
                    run(side)
            for side in (FUSED, SERIAL) if number % 2 else (SERIAL, FUSED):
                runs[side].append(run(side))
                digests.add(tuple(ranks.ask("digest")))
    if len(digests) != 1:
        raise RuntimeError(f"{setting.name}: fused and serial left different gradients")
    return training_row(cases[0], runs, measurement)


def training_row(case: TrainingCase, runs: Mapping[str, Sequence[Run]], measurement: Measurement) -> list[str]:
    setting = case.setting
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


# generation with inference ------------------------------------------------------------------------------------------


def generate(arguments: argparse.Namespace) -> None:
    traces = named("--traces", arguments.traces, {name: name for name in TRACES})
    measurement, rows = Measurement("paced_generation", arguments), []
    for name in traces[:1] if arguments.quick else traces:
        rows.append(GenerationCase(name, measurement).measure())
    columns = ("lengths", "p99.9 / p50", "serial", "predicted", "chosen R_t", "fused", "predicted", "gain", "predicted")
    columns += ("best R_t", "chosen over it", "mean error", "CPU", "late", "evidence")
    title = f"Generation with inference, {'/'.join(PAIR)}, {INSTANCES} instances; seconds of a cluster"
    measurement.table("generation", title, columns, rows)
    measurement.finish()


class GenerationCase:
    """One trace: all R_t, then serial, chosen and best in turns."""

    def __init__(self, name: str, measurement: Measurement) -> None:
        self.name, self.measurement, self.figures = name, measurement, measurement.part(name)
        quick = measurement.quick
        self.instances, longest = (2, 64) if quick else (INSTANCES, MAX_OUTPUT)
        samples = self.instances * SEQUENCES
        self.stretch, self.percents = (2.0, QUICK_PERCENTS) if quick else (STRETCH, PERCENTS)
        prompt = min(MAX_PROMPT, 4 * longest)
        self.lengths = trace_lengths(TRACES[name], samples, prompt, longest, measurement.arguments.seed)
        small = ("paced", 1, 1, 64, 64, 64, samples, prompt, longest, 8192)
        self.sizes = Sizes(*small, draft_rows=0, instances=self.instances)
        token_bytes = self.sizes.spec("actor").kv_bytes_per_token(ELEMENT_BYTES)
        cost = paced_cost(PAIR, SEQUENCES, self.lengths, longest, pads=False)
        self.cost = cost.of_run(self.stretch, token_bytes)
        self.limits = self.sizes.limits(self.cost.table, self.lengths)

    def measure(self) -> list[str]:
        made = {"sizes": asdict(self.sizes), "seed": self.measurement.arguments.seed, "cost": self.cost.to_dict()}
        best = sweep_threshold(self.lengths, self.instances, self.cost.table, self.limits).threshold
        swept = sorted({(self.sizes.samples * percent + 50) // 100 for percent in self.percents} | {best})
        with Ranks("paced_rank:PacedInstance", self.instances, ALLOCATOR, fork=True, **made) as ranks:
            ranks.ask("load", self.lengths, self.measurement.arguments.seed)
            self.ranks, self.digests = ranks, set()
            self.predicted = {r: self._predict(r) for r in swept}
            self._run(swept[-1])  # kernels are loaded, memory is allocated
            runs = {r: [self._run(r)] for r in swept}
            fastest = min(swept, key=lambda r: runs[r][0].seconds)
            for _ in range(0 if self.measurement.quick else self.measurement.arguments.rounds - 1):
                for r in sorted({0, best, fastest}):
                    runs[r].append(self._run(r))
        if len(self.digests) != 1:
            raise RuntimeError(f"{self.name}: runs at different R_t left different bits")
        return self._row(runs, best)

    def _predict(self, threshold: int) -> float:
        return simulate_gen_infer(self.lengths, self.instances, self.cost.table, self.limits, threshold).total_seconds

    def _run(self, threshold: int) -> Run:
        answers = self.ranks.ask("run", threshold, self.limits)
        self.digests |= {answer["digest"] for answer in answers}
        seconds = max(answer["total_seconds"] for answer in answers)
        run = Run.of(answers, self.predicted[threshold], seconds)
        told = f"CPU {run.cpu_share:.0%}, late {run.late_share:.2%}"
        self.measurement.say(f"{self.name}, R_t {threshold}: {seconds:.2f} s of {run.predicted:.2f} s, {told}")
        return run

    def _row(self, runs: Mapping[int, Sequence[Run]], chosen: int) -> list[str]:
        seconds = {r: statistics.median(run.seconds for run in mine) for r, mine in runs.items()}
        every, figures, samples = [run for mine in runs.values() for run in mine], self.figures, self.sizes.samples
        best = min(seconds, key=lambda r: seconds[r])
        gain = figures.figure("gain", Figure.of([seconds[0] / run.seconds for run in runs[chosen]], "x"))
        promised = figures.value("gain.predicted", self.predicted[0] / self.predicted[chosen], "x")
        over = figures.figure("chosen_over_best", Figure(seconds[chosen] / seconds[best], "x").at_most(CHOICE_GOAL))
        error = figures.value("mean_error", statistics.mean(abs(self.predicted[r] / s - 1) for r, s in seconds.items()))
        cpu = figures.value("cpu", max(run.cpu_share for run in every))
        late = figures.value("late", max(run.late_share for run in every))
        figures.figure("lateness", max(run.lateness for run in every), "s")
        rows = []
        for r, measured in seconds.items():
            predicted, mark = self.predicted[r], " chosen" if r == chosen else ""
            shown = [f"{one / self.stretch:.2f} s" for one in (measured, predicted)]
            rows.append([f"{r} ({r / samples:.0%}){mark}", *shown, f"{predicted / measured - 1:+.1%}"])
        head = ("R_t", "measured", "predicted", "error")
        self.measurement.table(f"{self.name}.sweep", f"{self.name}: every R_t, seconds of a cluster", head, rows)
        curve = [[r / samples, s / self.stretch, self.predicted[r] / self.stretch] for r, s in seconds.items()]
        self.measurement.facts(**{f"curve_{self.name}": curve})
        marks = self.lengths.percentiles()
        evidence = sum(run.is_evidence for run in every)
        shown = [f"{one / self.stretch:.2f} s" for one in (seconds[0], self.predicted[0])]
        fused = [f"{one / self.stretch:.2f} s" for one in (seconds[chosen], self.predicted[chosen])]
        ends = [f"{over.value:.3f}", f"{error:.1%}", f"{cpu:.0%}", f"{late:.2%}", f"{evidence} of {len(every)}"]
        tail = f"{marks['p999'] / marks['p50']:.1f}"
        return [self.name, tail, *shown, str(chosen), *fused, gain.text(), f"{promised:.2f}", str(best), *ends]


PARTS: Mapping[str, Callable[[argparse.Namespace], None]]
PARTS = {"training": train, "generation": generate, "iterations": iterate}


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", default="", help="training: some settings, as 16/8x16,8/8x8")
    parser.add_argument("--traces", default=",".join(TRACES), help="generation: lengths [%(default)s]")
    parser.add_argument(
        "--cells", default="all", help="iterations: actor/critic, padded or packed, as 33B/13B:P,33B/13B:K"
    )
    parser.add_argument("--continue", dest="journal", metavar="FILE", help="iterations: runs so far, kept and added to")
    arguments = parser.parse_args()
    PARTS[arguments.part](arguments)


if __name__ == "__main__":
    run_program(main)
