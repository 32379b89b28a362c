"""The sides of the intra-stage benchmark: what each rank runs, and when it is done if actions take their profiled time.

Actor stages are on ranks 0 and 1, critic stages on 1 and 0. Of what is profiled, `WHOLE` is a backward and `INPUT` the
one that leaves weights to `WEIGHT`. Schedules are made for equal micro-batches, as a plan has them, in whole
microseconds; what a side promises is of the micro-batches as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.tools.run_report.program_times import makespan, program_times

RANKS = 2
LAYOUT = ParallelLayout(1, 1, RANKS)
MODELS = ("actor", "critic")
HEAD_DIM = 64
MICROSECONDS = 1e6
SEARCH_MOVES = 500_000  # the most: most of these problems are proved optimal at once

MEGATRON = "megatron_1f1b"  # Megatron's forward_backward_pipelining_without_interleaving, actor, barrier, critic
SERIAL = "serial"  # our executor, 1F1B, a barrier between the models as their optimizer steps are
NO_BARRIER = "serial_no_barrier"
FUSED = "fused"
SPLIT = "split"  # fused, with the backwards of inputs and of weights apart
PLAIN = (MEGATRON, SERIAL, NO_BARRIER, FUSED, SPLIT)
STEPS = {SERIAL: "serial_step", FUSED: "fused_step", SPLIT: "split_step"}  # with each model's optimizer step
SIDES = (*PLAIN, *STEPS.values())
SAME_GRADIENTS = (PLAIN, tuple(STEPS.values()))  # an optimizer step clips the gradients that it leaves

FORWARD, WHOLE, INPUT, WEIGHT, REDUCTION, STEP = "F", "B", "B of input", "W", "RG", "ST"
BACKWARDS = ((WHOLE,), (INPUT, WEIGHT))
# Profiled seconds of an action by (model, stage, what), of each micro-batch, or one value that is that of all.
Times = Mapping[tuple[str, int, str], Sequence[float]]
Phase = dict[int, Program]  # of all ranks, from a barrier on
SORTED, UNSORTED = "sorted", "unsorted"
Turns = Mapping[str, tuple[str, Sequence[int]]]  # by name: a side, and which micro-batch it trains n-th


@dataclass(frozen=True)
class Sizes:
    """A pair of models, what one of equal micro-batches of them holds, and the samples that unequal ones are cut of."""

    name: str  # "1:1"
    layers: tuple[int, int]  # of actor and critic
    hidden: int
    mlp: int
    vocab: int
    sequences: int  # of one micro-batch
    tokens: int  # of one of them
    samples: int
    longest: int  # of them, in tokens

    def spec(self, model: str) -> ModelSpec:
        layers, heads = self.layers[MODELS.index(model)], self.hidden // HEAD_DIM
        context = max(self.tokens, self.longest)
        return ModelSpec("llama", layers, self.hidden, heads, heads, HEAD_DIM, self.mlp, self.vocab, context)


def rank_layout() -> FusedRanks:
    return rank_map(dict.fromkeys(MODELS, LAYOUT))


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
        """What the ranks run one after the other in a side of our executor."""
        steps, apart = side in STEPS.values(), side in (SERIAL, STEPS[SERIAL])
        plain = next((name for name, with_steps in STEPS.items() if with_steps == side), side)
        programs = lower(self.schedules[NO_BARRIER if apart else plain], rank_layout())

        def of(models: Sequence[str]) -> Phase:
            """Reductions and optimizer steps have no micro-batch."""
            kept = {
                rank: tuple(
                    one
                    for one in program.instructions
                    if one.action.pipeline in models and (steps or one.action.microbatch is not None)
                )
                for rank, program in programs.items()
            }
            return {rank: Program(rank, instructions) for rank, instructions in kept.items()}

        return [of([model]) for model in MODELS] if apart else [of(MODELS)]

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
