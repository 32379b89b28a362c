"""Shards of a model named one by one, and their holders: the reference for what is derived from layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.shards import Cells, Shard, weights_by_stage
from rlhfuse.decisions.weight_holders import HeldWeight, WeightHolders


def holders_of(shards: Sequence[Shard]) -> WeightHolders:
    """Holders of any shards, in any order."""
    by_tensor: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_tensor[shard.tensor].append(shard)
    lists: dict[tuple[int, ...], int] = {}
    weights = {}
    for tensor, held in by_tensor.items():
        parts = tuple((start, stop, lists.setdefault(ranks, len(lists))) for start, stop, ranks in _covered(held))
        weights[tensor] = HeldWeight(held[0].row_bytes, max(shard.bytes for shard in held), parts)
    ranks = np.array([rank for ranks in lists for rank in ranks], np.int64)
    return WeightHolders(weights, ranks, np.cumsum([0, *map(len, lists)]))


def _covered(shards: Sequence[Shard]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The finest parts between all borders of one weight's shards that some rank has, and these ranks."""
    borders = sorted({border for shard in shards for segment in shard.segments for border in segment})
    for start, stop in zip(borders, borders[1:]):
        ranks = (s.rank for s in shards if any(first <= start < end for first, end in s.segments))
        if ranks := tuple(sorted(ranks)):
            yield start, stop, ranks


def model_shards(
    spec: ModelSpec, layout: ParallelLayout, cells: Cells, element_bytes: int, scalar_head: bool = False
) -> list[Shard]:
    """Every shard of every rank, rank by rank. `cells` name the ranks of the layout (schedule/ir/ranks.py)."""
    by_stage = weights_by_stage(spec, layout, element_bytes, scalar_head)
    return [
        Shard(weight.name, rank, weight.segments(tp_rank, layout.tp), weight.row_bytes)
        for pipeline in cells
        for place, cell in enumerate(pipeline)
        for tp_rank, rank in enumerate(cell)
        for stage in range(place, layout.stages, layout.pp)
        for weight in by_stage[stage]
    ]
