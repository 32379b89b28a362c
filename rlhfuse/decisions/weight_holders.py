"""Which ranks hold which part of every weight, told by lists of ranks: weights of one shape at one place share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.shards import Cells, Weight, weights_by_stage

Parts = tuple[tuple[int, int, int], ...]  # (start, stop, list of ranks): indices of the cut dimension; they ascend


class HeldWeight(NamedTuple):
    """One weight: `row_bytes` of an index of its cut dimension, `most_bytes` of a rank, and who holds each part."""

    row_bytes: int
    most_bytes: int
    parts: Parts


@dataclass(frozen=True)
class WeightHolders:
    """Holders of a model's weights. List i, which ascends, is `ranks[starts[i] : starts[i + 1]]`."""

    weights: Mapping[str, HeldWeight]
    ranks: np.ndarray
    starts: np.ndarray

    @staticmethod
    def of_layout(
        spec: ModelSpec, layout: ParallelLayout, cells: Cells, element_bytes: int, scalar_head: bool = False
    ) -> WeightHolders:
        """Holders of a model in a layout whose ranks are `cells`, without naming its shards one by one.

        Each place of a pipeline has a list of all its ranks, then one of each tensor rank's.
        """
        grid = np.asarray(cells, np.int64).transpose(1, 2, 0)  # [place, tensor rank, pipeline]
        places, tp, pipelines = grid.shape
        rows = np.sort(grid.reshape(places, -1), axis=1), np.sort(grid, axis=2).reshape(places, -1)
        sizes = [tp * pipelines, *[pipelines] * tp] * places
        shapes: dict[tuple, HeldWeight] = {}
        weights = {}
        for stage, held in enumerate(weights_by_stage(spec, layout, element_bytes, scalar_head)):
            place = stage % layout.pp
            for weight in held:
                key = (*weight[1:], place)
                if key not in shapes:
                    shapes[key] = _held(weight, tp, place * (tp + 1))
                weights[weight.name] = shapes[key]
        return WeightHolders(weights, np.concatenate(rows, axis=1).reshape(-1), np.cumsum([0, *sizes]))

    def bounds(self, devices_per_node: int, nodes: int) -> np.ndarray:
        """[list, node]: `ranks[b[i, n] : b[i, n + 1]]` are those of list i on node n."""
        lists = len(self.starts) - 1
        which = np.repeat(np.arange(lists), np.diff(self.starts)) * nodes + self.ranks // devices_per_node
        counts = np.bincount(which, minlength=lists * nodes).reshape(lists, nodes)
        return self.starts[:-1, None] + np.concatenate([np.zeros((lists, 1), np.int64), counts.cumsum(axis=1)], axis=1)


def _held(weight: Weight, tp: int, first_list: int) -> HeldWeight:
    if not weight.cut:
        return HeldWeight(weight.row_bytes, weight.rows * weight.row_bytes, ((0, weight.rows, first_list),))
    parts = [(*segment, first_list + 1 + t) for t in range(tp) for segment in weight.segments(t, tp)]
    most = sum(stop - start for start, stop in weight.segments(0, tp)) * weight.row_bytes
    return HeldWeight(weight.row_bytes, most, tuple(sorted(parts)))
