"""Layers per pipeline stage of the models that train: as the layout says, evenly, or the cut whose slowest rank is
fastest.

All layers of a model weigh the same; embedding, output layer and loss come on top of the first and the last stage. So
layers are dealt one by one to the least loaded rank, which is exact and needs no search and no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.table import CostTable
from rlhfuse.tasks.task import ModelTask

EXACT_SECONDS = 1e-9  # seconds are compared in whole numbers of these: ties are ties on every rank


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
    tasks: tuple[ModelTask, ...], analytic: Mapping[str, AnalyticCost], costs: CostTable, micro: MicrobatchTokens
) -> tuple[StageBalance, ...]:
    """Balances of each model that trains in a pipeline; micro-batches as in `with_cuts`."""
    balances = []
    for task in tasks:
        if task.training and task.layout.stages > 1:
            cost = analytic[task.name]
            cut = tuple(map(len, cost.layout.stage_layers(cost.spec.layers)))
            ranks = costs.stage_seconds(task.role, cost, micro).of_ranks(cut, cost.layout.pp)
            balances.append(StageBalance(task.role, cut, max(ranks), sum(ranks) / len(ranks)))
    return tuple(balances)


def with_cuts(
    stage_layers: str,
    tasks: tuple[ModelTask, ...],
    analytic: Mapping[str, AnalyticCost],
    costs: CostTable,
    micro: MicrobatchTokens,
) -> tuple[ModelTask, ...]:
    """`tasks` with the layers of each stage, the same on every rank.

    `stage_layers`: as parallel has it. `micro`: of the longest samples, which need no known lengths.
    """

    def layout(task: ModelTask) -> ParallelLayout:
        if not task.training:
            return _tidy(task.layout)
        cost = analytic[task.name]
        return with_cut(stage_layers, cost, costs.stage_seconds(task.role, cost, micro))

    return tuple(replace(task, layout=layout(task)) for task in tasks)


def with_cut(stage_layers: str, cost: AnalyticCost, seconds: StageSeconds) -> ParallelLayout:
    """The layout of a model that trains, likewise; `seconds`: of the micro-batch."""
    if cost.layout.cut is None and stage_layers == "auto":
        return _fastest(cost, seconds)
    return _tidy(cost.layout)


def _tidy(layout: ParallelLayout) -> ParallelLayout:
    """An even cut needs no mention."""
    return layout.with_cut(layout.cut) if layout.cut else layout


def _fastest(cost: AnalyticCost, seconds: StageSeconds) -> ParallelLayout:
    """The even cut unless another is faster, where bytes are the machine's, whichever rank has them."""
    layout, spec = cost.layout, cost.spec
    fastest = fastest_cut(spec.layers, layout.pp, seconds, spec.layer_parameters, cost.memory.end_parameters())
    if not cost.hardware.device.own_memory:
        even, best = (max(seconds.of_ranks(cut, layout.pp)) for cut in (layout.even_cut(spec.layers), fastest))
        return layout if even <= best * (1 + 1e-6) else layout.with_cut(fastest)
    return layout.with_cut(fastest)


def fastest_cut(
    layers: int, places: int, seconds: StageSeconds, layer_parameters: int, end_parameters: Sequence[int]
) -> tuple[int, ...]:
    """Layers of each stage, one at least, of a pipeline over `places` ranks; `end_parameters`: by stage.

    No cut has a faster slowest rank; of those that tie none has a leaner fullest rank, and the rest is shared evenly.
    The stages of one rank share its layers so that the slowest of them is fastest.
    """
    stages = len(seconds.ends)
    chunks = stages // places
    layer_ticks, *end_ticks = (round(sum(part) / EXACT_SECONDS) for part in (seconds.layer, *seconds.ends))
    least, most = [chunks] * places, [layers] * places
    for unit, ends in ((layer_ticks, end_ticks), (layer_parameters, end_parameters)):
        fixed = [sum(ends[place::places]) for place in range(places)]
        dealt = _deal(layers, unit, fixed, least, most)
        largest = max(count * unit + end for count, end in zip(dealt, fixed))
        most = [min(limit, (largest - end) // unit) if unit else limit for limit, end in zip(most, fixed)]
    dealt, cut = _deal(layers, 1, [0] * places, least, most), [0] * stages
    if chunks == 1:
        return tuple(dealt)
    for place, count in enumerate(dealt):
        cut[place::places] = _deal(count, layer_ticks, end_ticks[place::places], [1] * chunks, [count] * chunks)
    return tuple(cut)


def _deal(layers: int, unit: int, fixed: Sequence[int], least: Sequence[int], most: Sequence[int]) -> list[int]:
    """`least` layers to each, the others to whoever is then least loaded, up to `most`; ties to the first with the
    fewest layers."""
    counts = list(least)
    heap = [((n + 1) * unit + fixed[place], n, place) for place, n in enumerate(counts) if n < most[place]]
    heapq.heapify(heap)
    for _ in range(layers - sum(least)):
        load, count, place = heap[0]
        counts[place] = count + 1
        if count + 1 < most[place]:
            heapq.heapreplace(heap, (load + unit, count + 1, place))
        else:
            heapq.heappop(heap)
    return counts
