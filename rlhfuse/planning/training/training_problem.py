"""The scheduling problem of a run's training: one mini-batch on one fused group, priced by the run's costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.training import TICK_SECONDS, MicrobatchTokens
from rlhfuse.costs.table import CostTable
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.planning.training.drawn_batches import DrawnBatches
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.problem import FusionProblem, Number, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import ModelShare, fused_shape
from rlhfuse.tasks.task import TASKS, TRAINED

BOUND_PRECISION = 0.0005  # of a bound that layouts are chosen by; what is proved beyond it costs most of the time


def planned_bound(problem: FusionProblem) -> Number:
    """The latency bound of a problem, as near as choices of a plan want it. Raises InputError alike."""
    return latency_bound(problem, BOUND_PRECISION)


def longest_microbatch(longest: tuple[int, int], batch: BatchArithmetic) -> MicrobatchTokens:
    """A micro-batch of as many tokens as there may be, of samples that are as long as they can become: `longest`,
    tokens of prompt and response."""
    prompt, response = longest
    samples = batch.cut.tokens / (prompt + response)
    return MicrobatchTokens(batch.cut.tokens, samples, samples * response)


def equal_microbatch(drawn: DrawnBatches, batch: BatchArithmetic, rung: int, share: ModelShare) -> MicrobatchTokens:
    """The micro-batch that times of a model are for, where an actor pipeline takes `rung` of them. Its pipelines are as
    deep as they have nodes: the second chunk of an interleaved one begins while others run its first."""
    return drawn.microbatch(batch.cut, rung, share.layout.dp, share.depth)


@dataclass(frozen=True)
class TrainingWork:
    """What the scheduling problems of a run's mini-batches follow from.

    `analytic`: rooflines by task. Times are for the micro-batches of `drawn`: measured where `costs` has them, else
    analytic. Activations are for the `longest` micro-batch.
    """

    analytic: Mapping[str, AnalyticCost]
    costs: CostTable
    batch: BatchArithmetic
    drawn: DrawnBatches
    longest: MicrobatchTokens
    alternates: bool = True

    def problem(self, rung: int, split: Collection[str] = ()) -> FusionProblem:
        """A mini-batch of `rung` micro-batches per actor pipeline on one fused group, without a memory cap; backwards
        of the models in `split` in two parts. Ticks of TICK_SECONDS, and bytes.

        What a stage computes reaches the next one a `transfer` later, by the slowest hop of any model; the sender goes
        on.
        """
        trained = {TASKS[task].role: self.analytic[task] for task in TRAINED if task in self.analytic}
        layouts: dict[str, ParallelLayout] = {model: cost.layout for model, cost in trained.items()}
        stages: dict[str, StageCosts] = {}
        shape, transfer = fused_shape(layouts, self.alternates), 0
        for model, cost in trained.items():
            micro = equal_microbatch(self.drawn, self.batch, rung, shape.share(model))
            transfer = max(transfer, transfer_ticks(cost, micro))
            seconds = self.costs.stage_seconds(model, cost, micro)
            stages[model] = cost.stage_costs(self.longest, model in split, seconds)
        return replace(fused_problem(layouts, rung, stages, alternate=self.alternates), transfer=transfer)


def transfer_ticks(cost: AnalyticCost, micro: MicrobatchTokens) -> int:
    """Ticks that a hidden state takes to the next stage."""
    return round(cost.send_seconds(micro.tokens) / TICK_SECONDS)
