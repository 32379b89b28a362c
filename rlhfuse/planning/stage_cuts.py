"""How the models that train are cut into pipeline stages: as the layout says, evenly, or as the cost model finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import CostModel, TrainingCost
from rlhfuse.costs.stage_cut import MicrobatchTokens, StageSeconds, fastest_cut
from rlhfuse.decisions.layouts import Task


@dataclass(frozen=True)
class StageBalance:
    """A model's layers on each stage, and forward and backward of a micro-batch of the longest samples on its ranks:
    of the slowest, and the mean."""

    model: str
    layers: tuple[int, ...]
    slowest_seconds: float
    mean_seconds: float

    def __str__(self) -> str:
        gap = f"slowest stage {self.slowest_seconds / self.mean_seconds - 1:.1%} above the mean"
        seconds = f"{self.slowest_seconds:.3g} s of {self.mean_seconds:.3g} s"
        return f"{self.model:10s} {', '.join(map(str, self.layers))}: {gap} ({seconds} a micro-batch)"


def stage_balances(
    tasks: tuple[Task, ...], analytic: Mapping[str, AnalyticCost], costs: CostModel, micro: MicrobatchTokens
) -> tuple[StageBalance, ...]:
    """Balances of each model that trains in a pipeline; micro-batches as in `with_cuts`."""
    found = []
    for task in tasks:
        if task.training and task.layout.stages > 1:
            cost = analytic[task.name]
            cut = tuple(map(len, cost.layout.stage_layers(cost.spec.layers)))
            seconds = costs.training_cost(task.role, cost).stage_seconds(micro)
            ranks = seconds.of_ranks(cut, cost.layout.pp)
            found.append(StageBalance(task.role, cut, max(ranks), sum(ranks) / len(ranks)))
    return tuple(found)


def with_cuts(
    config: RunConfig,
    tasks: tuple[Task, ...],
    analytic: Mapping[str, AnalyticCost],
    costs: CostModel,
    micro: MicrobatchTokens,
) -> tuple[Task, ...]:
    """`tasks` with the layers of each stage, the same on every rank.

    `micro`: of the longest samples, which need no known lengths.
    """

    def layout(task: Task) -> ParallelLayout:
        if not task.training:
            return _tidy(task.layout)
        cost = analytic[task.name]
        return with_cut(config, cost, costs.training_cost(task.role, cost), micro)

    return tuple(replace(task, layout=layout(task)) for task in tasks)


def with_cut(config: RunConfig, cost: AnalyticCost, training: TrainingCost, micro: MicrobatchTokens) -> ParallelLayout:
    """The layout of a model that trains, likewise."""
    if cost.layout.cut is None and config.parallel.stage_layers == "auto":
        return _fastest(cost, training.stage_seconds(micro))
    return _tidy(cost.layout)


def _tidy(layout: ParallelLayout) -> ParallelLayout:
    """An even cut needs no mention."""
    return layout.with_cut(layout.cut) if layout.cut else layout


def _fastest(cost: AnalyticCost, seconds: StageSeconds) -> ParallelLayout:
    """On CPU the even cut unless another is faster: bytes are the machine's, whichever rank has them."""
    layout, spec = cost.layout, cost.spec
    found = fastest_cut(spec.layers, layout.pp, seconds, spec.layer_parameters, cost.end_parameters())
    if cost.hardware.name == "cpu":
        even, best = (max(seconds.of_ranks(cut, layout.pp)) for cut in (layout.even_cut(spec.layers), found))
        return layout if even <= best * (1 + 1e-6) else layout.with_cut(found)
    return layout.with_cut(found)
