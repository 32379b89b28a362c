"""Whole layers per pipeline stage: the cut whose slowest rank is fastest.

All layers of a model weigh the same; embedding, output layer and loss come on top of the first and the last stage. So
layers are dealt one by one to the least loaded rank, which is exact and needs no search and no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

EXACT_SECONDS = 1e-9  # seconds are compared in whole numbers of these: ties are ties on every rank


class MicrobatchTokens(NamedTuple):
    """What a micro-batch holds: tokens of so many sequences, and how many of them go through the output layer."""

    tokens: float
    sequences: float
    outputs: float


@dataclass(frozen=True)
class StageSeconds:
    """Seconds (forward, backward) of one micro-batch: of a layer, and of what each stage has beside its layers."""

    layer: tuple[float, float]
    ends: tuple[tuple[float, float], ...]  # by stage
    split: tuple[float, float] | None = None  # B and W of a layer's split backward; None: not known

    def of(self, cut: Sequence[int]) -> tuple[tuple[float, float], ...]:
        """Seconds (forward, backward) of each stage, where they have so many layers."""
        forward, backward = self.layer
        return tuple((count * forward + end[0], count * backward + end[1]) for count, end in zip(cut, self.ends))

    def ticks(self, cut: Sequence[int], tick_seconds: float, split: bool = False) -> tuple[tuple[int, ...], ...]:
        """Forward and backward of each stage in whole ticks, at least one; with `split` F, B and W. Ends have no W."""
        stages: Sequence[tuple[float, ...]] = self.of(cut)
        if split:
            assert self.split is not None, "split backwards have a price"
            whole = replace(self, layer=(self.layer[0], self.split[0])).of(cut)
            stages = [(*stage, layers * self.split[1]) for stage, layers in zip(whole, cut)]
        rounded = [[max(1, round(seconds / tick_seconds)) for seconds in stage] for stage in stages]
        return tuple(zip(*rounded))

    def of_ranks(self, cut: Sequence[int], places: int) -> tuple[float, ...]:
        """Forward and backward together of all that each rank of a pipeline has: stages place, place + places, ..."""
        stages = [sum(stage) for stage in self.of(cut)]
        return tuple(sum(stages[place::places]) for place in range(places))


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
