"""What the intra-stage benchmark trains, how it may be trained, and the schedules for it.

A case is a pair of models and a number of micro-batches; a side is one way to train it. Both models have two stages
on two ranks, in opposite directions. Knows nothing of processes or of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan
from rlhfuse.schedule.search.search import SearchSettings, search

RANKS = 2
LAYOUT = ParallelLayout(1, 1, RANKS)
MODELS = ("actor", "critic")
HEAD_DIM = 64
MICROSECONDS = 1e6
SEARCH_MOVES = 500_000  # the most: most of these problems are proved optimal at once

MEGATRON = "megatron_1f1b"  # Megatron's own loop, actor then critic
SERIAL = "serial"  # our executor, 1F1B, a barrier between the models as their optimizer steps are
NO_BARRIER = "serial_no_barrier"  # the same without the barrier
FUSED = "fused"
SERIAL_STEP = "serial_step"  # as SERIAL, and each model's optimizer step
FUSED_STEP = "fused_step"  # as FUSED, and both models' optimizer steps
SIDES = (MEGATRON, SERIAL, NO_BARRIER, FUSED, SERIAL_STEP, FUSED_STEP)
SAME_GRADIENTS = (SIDES[:4], SIDES[4:])  # an optimizer step clips the gradients that it leaves
BASELINES = (MEGATRON, SERIAL)  # the headline is against the faster of them


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

    @property
    def microbatch_tokens(self) -> int:
        return self.sequences * (self.prompt_tokens + self.response_tokens)

    def spec(self, model: str) -> ModelSpec:
        heads = self.hidden // HEAD_DIM
        return ModelSpec(
            "llama",
            self.layers[MODELS.index(model)],
            self.hidden,
            heads,
            heads,
            HEAD_DIM,
            self.mlp,
            self.vocab,
            context=self.prompt_tokens + self.response_tokens,
        )


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    sizes: Sizes
    microbatches: int

    @property
    def name(self) -> str:
        return f"{self.sizes.name} M={self.microbatches}"


FULL = (
    Sizes("1:1", (8, 8), 512, 1376, 512, 3, 16, 80),
    Sizes("2.5:1", (10, 4), 512, 1376, 512, 3, 16, 80),
)
QUICK = (Sizes("1:1", (2, 2), 128, 352, 256, 2, 8, 24), Sizes("2.5:1", (5, 2), 128, 352, 256, 2, 8, 24))
MICROBATCHES = (2, 4, 8)


@dataclass(frozen=True)
class Times:
    """Profiled seconds of one action, by (model, stage, kind)."""

    seconds: Mapping[tuple[str, int, str], float]

    def costs(self, model: str) -> StageCosts:
        """In whole microseconds."""

        def row(kind: str) -> tuple[int, ...]:
            return tuple(round(self.seconds[model, s, kind] * MICROSECONDS) for s in range(LAYOUT.pp))

        return StageCosts(row("F"), row("B"), (1,) * LAYOUT.pp)


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
        return Schedules(
            serial,
            fused,
            float(serial_makespan(problem)),
            float(evaluate(serial).makespan),
            float(timeline.makespan),
            float(latency_bound(problem)),
            tuple(map(int, timeline.node_peak_memory)),  # an activation counts 1
        )


def rank_layout() -> FusedRanks:
    """Actor stages on ranks 0, 1; critic stages on ranks 1, 0."""
    return rank_map(dict.fromkeys(MODELS, LAYOUT))


def problem_of(case: Case, times: Times) -> FusionProblem:
    costs = {model: times.costs(model) for model in MODELS}
    return fused_problem(dict.fromkeys(MODELS, LAYOUT), case.microbatches, costs)
