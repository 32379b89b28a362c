"""Speed of fused training of an actor and a critic beside serial training, on two ranks of one CPU machine.

    python benchmarks/intra_stage.py [--sizes 1:1] [--microbatches 2,4,samples,tokens] [--lengths FILE]

Two processes of one thread train two random Llamas over gloo, the actor's stages on ranks 0 and 1, the critic's on 1
and 0. Each side trains one mini-batch in turn, and all must leave the same gradients, bit for bit. Schedules are made
of action times profiled with both ranks busy; what they promise stands beside what is measured. Micro-batches are so
many equal ones, or cut of a trace's lengths by the product's MicrobatchCut, heaviest first and in the order of the
draw: by samples each has one, by tokens as many as fit into two of the longest.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from harness import DATA, Figure, Measurement, Part, named, options, take_turns
from intra_stage_rank import FORWARD, INPUT, LAYOUT, MEGATRON, MODELS, RANKS, WEIGHT, WHOLE, Sizes, rank_layout
from processes import ALLOCATOR, Ranks

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.simulator.lengths import SampleLengths, load_lengths
from rlhfuse.tasks.microbatch_cut import MicrobatchCut
from rlhfuse.tools.program import run_program
from rlhfuse.tools.run_report.program_times import makespan, program_times

MICROSECONDS = 1e6
SEARCH_MOVES = 500_000  # the most: most of these problems are proved optimal at once

SERIAL = "serial"  # our executor, 1F1B, a barrier between the models as their optimizer steps are
NO_BARRIER = "serial_no_barrier"
FUSED = "fused"
SPLIT = "split"  # fused, with the backwards of inputs and of weights apart
SIDES = (MEGATRON, SERIAL, NO_BARRIER, FUSED, SPLIT)

BACKWARDS = ((WHOLE,), (INPUT, WEIGHT))
# Profiled seconds of an action by (model, stage, what), of each micro-batch, or one value that is that of all.
Times = Mapping[tuple[str, int, str], Sequence[float]]
Phase = dict[int, Program]  # of all ranks, from a barrier on
SORTED, UNSORTED = "sorted", "unsorted"
Turns = Mapping[str, tuple[str, Sequence[int]]]  # by name: a side, and which micro-batch it trains n-th

PROFILE_CYCLES = 5
QUICK_ROUNDS = 2
FULL = (Sizes("1:1", (8, 8), 512, 1376, 512, 3, 96, 16, 192), Sizes("2.5:1", (10, 4), 512, 1376, 512, 3, 96, 16, 192))
QUICK = (Sizes("1:1", (2, 2), 128, 352, 256, 2, 32, 8, 64), Sizes("2.5:1", (5, 2), 128, 352, 256, 2, 32, 8, 64))
TRACE = DATA / "traces" / "sharegpt8k_llama2tok.csv"
LIMIT = 1024  # tokens of a prompt, and of a response, that the trace is cut to before it is scaled
BY_SAMPLES, BY_TOKENS = "samples", "tokens"
TOKENS = 2  # of the longest sample fit into a micro-batch by tokens

BASELINES = (MEGATRON, SERIAL)  # the headline is against the faster of them

PREDICTED_GOAL = 0.95  # of the predicted speedup
LARGE = 1.04  # a split that lowers the bound by so much has to be faster
OVERHEAD_GOAL = 60.0  # microseconds of the executor's own Python per instruction
SHARE_GOAL = 0.03  # of a rank's time

Answers = Sequence[Mapping[str, Any]]  # of a run's ranks

PROMISE = ("speedup", "predicted", "of it")
TABLES = {
    "speed": (
        "Fused beside serial training",
        ("M", "Megatron 1F1B", "serial", "no barrier", "fused", *PROMISE, "bound"),
    ),
    "split": (
        "Fused with split backwards",
        ("M", "split", *PROMISE, "bound", "over fused", "predicted", "bound", "B + W over whole"),
    ),
    "unequal": (
        "Fused beside serial training, unequal micro-batches of a real trace",
        ("cut by", "M", "order", "serial", "planned / priced", "fused", "planned / priced", *PROMISE),
    ),
    "order": (
        "Sorted beside unsorted micro-batches",
        ("cut by", "M", "serial: speedup", *PROMISE[1:], "fused: speedup", *PROMISE[1:]),
    ),
}

Lengths = Sequence[tuple[int, ...]]  # tokens of each sequence of each micro-batch


def main() -> None:
    arguments = parse_arguments()
    measurement = Measurement("intra_stage", arguments)
    rows: dict[str, list[list[str]]] = defaultdict(list)
    for sizes in named("--sizes", arguments.sizes, {one.name: one for one in (QUICK if arguments.quick else FULL)}):
        made = {"sizes": asdict(sizes), "seed": arguments.seed}
        with Ranks("intra_stage_rank:TrainingRank", RANKS, ALLOCATOR, **made) as ranks:
            for word in arguments.microbatches:
                for table, row in measure(sizes, word, ranks, measurement):
                    rows[table].append([sizes.name, *row])
    for name, (title, columns) in TABLES.items():
        if rows[name]:
            measurement.table(name, title, ("models", *columns), rows[name])
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=11)
    parser.add_argument("--sizes", default="1:1,2.5:1", help="layers of the actor over those of the critic")
    parser.add_argument("--microbatches", default="2,4,8,samples,tokens", help="so many, or cut by [%(default)s]")
    parser.add_argument("--lengths", default=TRACE, metavar="FILE", help="csv, jsonl or parquet, of prompts too")
    arguments = parser.parse_args()
    arguments.microbatches = [word.strip() for word in arguments.microbatches.split(",")]
    for word in arguments.microbatches:
        if word not in (BY_SAMPLES, BY_TOKENS) and not (word.isdigit() and int(word) > 1):
            told = f"{word!r} is not a number of at least 2, {BY_SAMPLES} or {BY_TOKENS}"
            raise InputError(f"--microbatches {','.join(arguments.microbatches)}: {told}")
    given = {BY_SAMPLES, BY_TOKENS} & set(arguments.microbatches)
    arguments.trace = load_lengths(arguments.lengths).lengths.clip(LIMIT, LIMIT) if given else None
    arguments.rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    return arguments


def measure(sizes: Sizes, word: str, ranks: Ranks, measurement: Measurement) -> Iterator[tuple[str, list[str]]]:
    """Rows of the tables, each with its table's name, of a pair of models and a word of --microbatches.

    Profile, make the schedules, let the sides take turns.
    """
    name, arguments = sizes.name.replace(":", "to").replace(".", "_"), measurement.arguments
    if word.isdigit():
        lengths = [(sizes.tokens,) * sizes.sequences] * int(word)
        turns: Turns = {side: (side, range(int(word))) for side in SIDES}
        label, speeds, same, backwards, head = f"m{word}", EqualSpeeds, [SIDES], BACKWARDS, [word]
    else:
        (drawn,) = arguments.trace.draw(sizes.samples, 1, arguments.seed)
        lengths, unsorted = cut(sizes, word, drawn)
        orders = {SORTED: range(len(lengths)), UNSORTED: unsorted}
        same = [[f"{side}_{order}" for side in (SERIAL, FUSED)] for order in orders]
        turns = {f"{side}_{order}": (side, orders[order]) for order in orders for side in (SERIAL, FUSED)}
        label, speeds, backwards, head = word, UnequalSpeeds, BACKWARDS[:1], [word, str(len(lengths))]
    ranks.ask("load", lengths, {})
    case = Case.of(len(lengths), profiled(lengths, backwards, ranks), arguments.seed)
    rounds = run(case, turns, lengths, ranks, arguments.rounds, same)
    figures = measurement.part(f"{name}_{label}")
    for table, row in speeds(figures, case, turns, rounds).rows():
        yield table, [*head, *row]


def cut(sizes: Sizes, by: str, drawn: SampleLengths) -> tuple[Lengths, list[int]]:
    """A mini-batch of these lengths, scaled, as the product cuts it for one pipeline, the heaviest first; and its
    micro-batches in the order in which the first sample of each was drawn."""
    tokens = [math.ceil((p + o) * sizes.longest / (2 * LIMIT)) for p, o in zip(drawn.prompt, drawn.output)]
    batch = 1, sizes.samples, sizes.longest
    cuts = {
        BY_SAMPLES: MicrobatchCut.by_samples(sizes.samples, *batch),
        BY_TOKENS: MicrobatchCut.by_tokens(TOKENS * sizes.longest, *batch, least=RANKS),
    }
    parts = cuts[by].split(tokens)
    drawn_order = sorted(range(len(parts)), key=lambda number: parts[number][0])
    return [tuple(tokens[sample] for sample in part) for part in parts], drawn_order


def profiled(lengths: Lengths, backwards: Sequence[Sequence[str]], ranks: Ranks) -> Times:
    """Medians over cycles; where micro-batches are alike, of two of them together."""
    alike = len(set(lengths)) == 1
    found: dict[tuple[str, int, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for answer in ranks.ask("profile", PROFILE_CYCLES, 2 if alike else len(lengths), backwards):
        for (model, stage, what, microbatch), seconds in answer.items():
            found[model, stage, what][0 if alike else microbatch] += seconds
    return {key: [statistics.median(values[mb]) for mb in sorted(values)] for key, values in found.items()}


def run(
    case: Case, turns: Turns, lengths: Lengths, ranks: Ranks, rounds: int, same: Sequence[Sequence[str]]
) -> dict[str, list[Answers]]:
    """All ranks' answers of every round, by name. Groups in `same` must leave the same gradients, bit for bit."""
    texts = {
        side: [tuple(phase[rank].text() for rank in range(RANKS)) for phase in case.phases(side)]
        for side in {side for side, _ in turns.values()} - {MEGATRON}
    }
    ranks.ask("load", lengths, texts)
    digests: dict[str, Any] = {}

    def train(name: str, number: int) -> Answers:
        answers = ranks.ask("run", *turns[name])
        if number < 0:
            digests[name] = ranks.ask("digest")
        return answers

    made = take_turns({name: partial(train, name) for name in turns}, rounds, warm_up=True)
    for group in same:
        if not all(digests[name] == digests[group[0]] for name in group):
            raise RuntimeError(f"{', '.join(group)} left different gradients")
    for name, (side, _) in turns.items():
        if side in (FUSED, SPLIT):
            check_peaks(case.schedules[side], made[name])
    return made


def check_peaks(schedule: Schedule, rounds: Sequence[Answers]) -> None:
    """Live micro-batches must be as scheduled."""
    for rank, expected in enumerate(map(int, evaluate(schedule).node_peak_memory)):  # an activation counts 1
        live = max(answers[rank]["peak_live"] for answers in rounds)
        assert live == expected, f"rank {rank}: kept {live} micro-batches, not {expected}"


def equal(seconds: Sequence[float]) -> float:
    """Seconds of equal micro-batches that take a pipeline as long as these do, as plans count (planning/training)."""
    return (sum(seconds) + (LAYOUT.pp - 1) * max(seconds)) / (len(seconds) + LAYOUT.pp - 1)


def problem_of(microbatches: int, times: Times, split: bool = False) -> FusionProblem:
    """An activation counts 1."""

    def row(model: str, what: str) -> tuple[int, ...]:
        return tuple(round(equal(times[model, stage, what]) * MICROSECONDS) for stage in range(LAYOUT.pp))

    def costs(model: str) -> StageCosts:
        whole = StageCosts(row(model, FORWARD), row(model, WHOLE), (1,) * LAYOUT.pp)
        return replace(whole, backward=row(model, INPUT), weight_gradient=row(model, WEIGHT)) if split else whole

    return fused_problem(dict.fromkeys(MODELS, LAYOUT), microbatches, {model: costs(model) for model in MODELS})


@dataclass(frozen=True)
class Case:
    """The schedules of one problem by side, and no schedule's makespan is below `bounds`, in seconds.

    Without times of split backwards there is no such side.
    """

    times: Times
    schedules: Mapping[str, Schedule]
    bounds: Mapping[str, float]

    @staticmethod
    def of(microbatches: int, times: Times, seed: int) -> Case:
        problems = {FUSED: problem_of(microbatches, times)}
        if any(what == WEIGHT for _, _, what in times):
            problems[SPLIT] = problem_of(microbatches, times, split=True)
        settings = SearchSettings(iterations=SEARCH_MOVES, seed=seed)
        found = {side: search(problem, settings)[0] for side, problem in problems.items()}
        bounds = {side: float(latency_bound(problem)) / MICROSECONDS for side, problem in problems.items()}
        return Case(times, {NO_BARRIER: serial_1f1b(problems[FUSED]), **found}, bounds)

    def phases(self, side: str) -> list[Phase]:
        """What the ranks run one after the other in a side of our executor, without reductions and optimizer steps."""
        programs = lower(self.schedules[NO_BARRIER if side == SERIAL else side], rank_layout())

        def of(models: Sequence[str]) -> Phase:
            kept = {
                rank: tuple(
                    one
                    for one in program.instructions
                    if one.action.pipeline in models and one.action.microbatch is not None
                )
                for rank, program in programs.items()
            }
            return {rank: Program(rank, instructions) for rank, instructions in kept.items()}

        return [of([model]) for model in MODELS] if side == SERIAL else [of(MODELS)]

    def predicted(self, side: str, order: Sequence[int] = ()) -> float:
        """Seconds of a side if every action takes its profiled time and transfers take none.

        `order`: which micro-batch is trained n-th, where they are not all alike.
        """

        def seconds(action: Action) -> float:
            values = self._profiled(side, action)
            return values[0] if len(values) == 1 else values[order[action.microbatch or 0]]

        return self._seconds(side, seconds)

    def planned(self, side: str) -> float:
        """The same with equal micro-batches."""
        return self._seconds(side, lambda action: equal(self._profiled(side, action)))

    def _seconds(self, side: str, seconds: Callable[[Action], float]) -> float:
        phases = self.phases(SERIAL if side == MEGATRON else side)
        return sum(makespan(program_times(phase, rank_layout(), seconds)) for phase in phases)

    def _profiled(self, side: str, action: Action) -> Sequence[float]:
        split = SPLIT in side and action.kind is Kind.B
        return self.times[action.pipeline, action.stage, INPUT if split else str(action.kind)]


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
        speed = [*(seconds[side] for side in SIDES[:-1]), *self._speedup("speedup", baseline, FUSED)]
        speed.append(self._bound(FUSED))
        split = [seconds[SPLIT], *self._speedup("split_speedup", baseline, SPLIT), self._bound(SPLIT)]
        yield from (("speed", speed), ("split", split + self._over_fused()))

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


if __name__ == "__main__":
    run_program(main)
