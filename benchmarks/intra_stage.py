"""Speed of fused training of an actor and a critic beside serial training, on two ranks of one CPU machine.

    python benchmarks/intra_stage.py [--trace trace.json]

Two processes of one thread train two random Llamas over gloo, the actor's stages on ranks 0 and 1, the critic's on 1
and 0. Each side trains one mini-batch in turn, and all must leave the same gradients, bit for bit. Schedules are made
of action times profiled with both ranks busy; what they promise stands beside what is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import Figure, Measurement, named, options, take_turns
from processes import ALLOCATOR, Ranks

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.monitor.trace import Span, save_trace
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program, Programs
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan
from rlhfuse.schedule.search.search import SearchSettings, search

RANKS = 2
LAYOUT = ParallelLayout(1, 1, RANKS)
MODELS = ("actor", "critic")
HEAD_DIM = 64
MICROSECONDS = 1e6
SEARCH_MOVES = 500_000  # the most: most of these problems are proved optimal at once
PROFILE_CYCLES = 8
QUICK_ROUNDS = 2
GAP_SECONDS = 0.05  # between two runs in the trace

MEGATRON = "megatron_1f1b"  # Megatron's forward_backward_pipelining_without_interleaving, actor, barrier, critic
SERIAL = "serial"  # our executor, 1F1B, a barrier between the models as their optimizer steps are
NO_BARRIER = "serial_no_barrier"
FUSED = "fused"
SERIAL_STEP = "serial_step"  # as SERIAL, and each model's optimizer step
FUSED_STEP = "fused_step"
SIDES = (MEGATRON, SERIAL, NO_BARRIER, FUSED, SERIAL_STEP, FUSED_STEP)
SAME_GRADIENTS = (SIDES[:4], SIDES[4:])  # an optimizer step clips the gradients that it leaves
BASELINES = (MEGATRON, SERIAL)  # the headline is against the faster of them

PREDICTED_GOAL = 0.95  # of the predicted speedup
OVERHEAD_GOAL = 60.0  # microseconds of the executor's own Python per instruction
SHARE_GOAL = 0.03  # of a rank's time


@dataclass(frozen=True)
class Sizes:
    """A pair of models and what one micro-batch of them holds."""

    name: str  # "1:1"
    layers: tuple[int, int]  # of actor and critic
    hidden: int
    mlp: int
    vocab: int
    sequences: int  # of one micro-batch
    prompt_tokens: int
    response_tokens: int

    def spec(self, model: str) -> ModelSpec:
        layers, heads = self.layers[MODELS.index(model)], self.hidden // HEAD_DIM
        context = self.prompt_tokens + self.response_tokens
        return ModelSpec("llama", layers, self.hidden, heads, heads, HEAD_DIM, self.mlp, self.vocab, context)


FULL = (Sizes("1:1", (8, 8), 512, 1376, 512, 3, 16, 80), Sizes("2.5:1", (10, 4), 512, 1376, 512, 3, 16, 80))
QUICK = (Sizes("1:1", (2, 2), 128, 352, 256, 2, 8, 24), Sizes("2.5:1", (5, 2), 128, 352, 256, 2, 8, 24))

Times = Mapping[tuple[str, int, str], float]  # profiled seconds of an action, by (model, stage, kind)


@dataclass(frozen=True)
class Schedules:
    """The two schedules of a case, and what they promise by the profiled times, in microseconds."""

    serial: Schedule
    fused: Schedule
    serial_time: float  # with a barrier between the models
    no_barrier_time: float
    fused_time: float
    bound: float  # no schedule is faster than this
    peak_live: tuple[int, ...]  # most micro-batches that the fused schedule keeps on each rank

    @staticmethod
    def of(problem: FusionProblem, seed: int) -> Schedules:
        serial = serial_1f1b(problem)
        fused, _ = search(problem, SearchSettings(iterations=SEARCH_MOVES, seed=seed))
        timeline = evaluate(fused)
        makespans = (serial_makespan(problem), evaluate(serial).makespan, timeline.makespan, latency_bound(problem))
        peak_live = tuple(map(int, timeline.node_peak_memory))  # an activation counts 1
        return Schedules(serial, fused, *map(float, makespans), peak_live)


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
    rows = []
    for sizes in named("--sizes", arguments.sizes, {one.name: one for one in (QUICK if arguments.quick else FULL)}):
        made = {"sizes": asdict(sizes), "seed": arguments.seed}
        with Ranks("intra_stage_rank:TrainingRank", RANKS, ALLOCATOR, **made) as ranks:
            for microbatches in arguments.microbatches:
                rows.append(measure(sizes, microbatches, ranks, measurement, spans))
    head = ("models", "M", "Megatron 1F1B", "serial", "no barrier", "fused", "speedup", "predicted", "of it", "bound")
    measurement.table("speed", "Fused beside serial training", (*head, "with steps"), rows)
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


def measure(sizes: Sizes, microbatches: int, ranks: Ranks, measurement: Measurement, spans: list[Span]) -> list[str]:
    """Profile, make the schedules, let the sides take turns; adds to `spans` and returns the row of the table."""
    name = f"{sizes.name.replace(':', 'to').replace('.', '_')}_m{microbatches}"
    ranks.ask("load", microbatches, {})
    profiles = ranks.ask("profile", PROFILE_CYCLES)
    times = {key: statistics.median(values) for answer in profiles for key, values in answer.items()}
    schedules = Schedules.of(problem_of(microbatches, times), measurement.arguments.seed)
    ranks.ask("load", microbatches, side_programs(schedules))
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
    add_details(name, measurement, schedules, times, rounds)
    spans += trace_spans(name, schedules, rounds, max((span.end_seconds for span in spans), default=0.0))
    return [sizes.name, str(microbatches), *add_speedups(name, measurement, schedules, rounds)]


def problem_of(microbatches: int, times: Times) -> FusionProblem:
    """In whole microseconds; an activation counts 1."""

    def row(model: str, kind: str) -> tuple[int, ...]:
        return tuple(round(times[model, stage, kind] * MICROSECONDS) for stage in range(LAYOUT.pp))

    costs = {model: StageCosts(row(model, "F"), row(model, "B"), (1,) * LAYOUT.pp) for model in MODELS}
    return fused_problem(dict.fromkeys(MODELS, LAYOUT), microbatches, costs)


def rank_layout() -> FusedRanks:
    """Actor stages on ranks 0, 1; critic stages on ranks 1, 0."""
    return rank_map(dict.fromkeys(MODELS, LAYOUT))


def side_programs(schedules: Schedules) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Text of what each rank runs in each phase of each side that our executor runs."""
    serial, fused = lower(schedules.serial, rank_layout()), lower(schedules.fused, rank_layout())

    def texts(programs: Programs, models: Sequence[str], steps: bool) -> tuple[str, ...]:
        """`steps`: with reductions and optimizer steps, which have no micro-batch."""
        return tuple(
            Program(
                rank,
                tuple(
                    instruction
                    for instruction in programs[rank].instructions
                    if instruction.action.pipeline in models and (steps or instruction.action.microbatch is not None)
                ),
            ).text()
            for rank in programs
        )

    return {
        SERIAL: tuple(texts(serial, [model], False) for model in MODELS),
        NO_BARRIER: (texts(serial, MODELS, False),),
        FUSED: (texts(fused, MODELS, False),),
        SERIAL_STEP: tuple(texts(serial, [model], True) for model in MODELS),
        FUSED_STEP: (texts(fused, MODELS, True),),
    }


def add_speedups(
    name: str, measurement: Measurement, schedules: Schedules, rounds: Mapping[str, Sequence[Round]]
) -> list[str]:
    """Speedups of the fused side beside what the schedules promise, and cells of the table."""
    seconds = {side: [run.seconds for run in runs] for side, runs in rounds.items()}
    medians = {
        side: measurement.figure(f"{name}.{side}", Figure.of(values, "s")).value for side, values in seconds.items()
    }
    promised = dict.fromkeys(BASELINES, schedules.serial_time / schedules.fused_time)
    promised[NO_BARRIER] = schedules.no_barrier_time / schedules.fused_time
    for side, promise in promised.items():
        found = measurement.figure(f"{name}.speedup_over_{side}", Figure.ratio(seconds[side], seconds[FUSED]))
        measurement.figure(f"{name}.of_predicted_over_{side}", found.value / promise)
    baseline = min(BASELINES, key=medians.__getitem__)
    head = measurement.figure(f"{name}.speedup", Figure.ratio(seconds[baseline], seconds[FUSED]))
    predicted = measurement.figure(f"{name}.predicted", promised[baseline], "x").value
    share = measurement.figure(f"{name}.of_predicted", Figure(head.value / predicted).at_least(PREDICTED_GOAL)).value
    bound = measurement.figure(f"{name}.bound", schedules.serial_time / schedules.bound, "x").value
    steps = measurement.figure(f"{name}.with_steps", Figure.ratio(seconds[SERIAL_STEP], seconds[FUSED_STEP])).value
    measurement.say(f"{name}: {head.text()} against {baseline}, predicted {predicted:.2f}")
    cells = [f"{medians[side]:.3f} s" for side in SIDES[:4]]
    return [*cells, head.text(), f"{predicted:.2f}", f"{share:.3f}", f"{bound:.2f}", f"{steps:.2f}"]


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


def add_details(
    name: str,
    measurement: Measurement,
    schedules: Schedules,
    times: Times,
    rounds: Mapping[str, Sequence[Round]],
) -> None:
    """Actions beside the profile that the schedule was made of; live micro-batches must be as scheduled."""
    rows = []
    for key, profiled in sorted(times.items()):
        seconds = [
            statistics.median(
                end - start
                for run in rounds[side]
                for rank in run.ranks
                for _, found, start, end in rank["actions"]
                if tuple(found) == key
            )
            for side in (FUSED, SERIAL)
        ]
        cells = [f"{1e3 * value:.2f} ms" for value in (profiled, *seconds)]
        rows.append([f"{key[0]}:{key[1]}{key[2]}", *cells, *(f"{value / profiled:.2f}" for value in seconds)])
    head = ("action", "profile", "fused", "serial", "fused / profile", "serial / profile")
    measurement.table(f"{name}.actions", f"{name}: seconds of an action", head, rows)
    for rank, expected in enumerate(schedules.peak_live):
        live = max(run.ranks[rank]["peak_live"] for run in rounds[FUSED])
        assert live == expected, f"rank {rank} kept {live} micro-batches for their backward, not {expected}"


def trace_spans(name: str, schedules: Schedules, rounds: Mapping[str, Sequence[Round]], begin: float) -> list[Span]:
    """The median runs, serial without barrier and fused, predicted and measured, one after the other."""
    spans: list[Span] = []
    for side, schedule in ((NO_BARRIER, schedules.serial), (FUSED, schedules.fused)):
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
