"""Which rank holds which part of which weight: a model in a layout, as plain numbers.

A weight is cut along one dimension. A tensor rank holds one segment of it, or several where two weights were joined
before the cut (gate and up of the MLP), stored one after the other. Names are Megatron-core's, layers numbered over
the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.layer_weights import layer_weights
from rlhfuse.config.spec import ModelSpec

Cells = tuple[tuple[tuple[int, ...], ...], ...]  # [pipeline][place][tensor rank] -> global rank


class Shard(NamedTuple):
    """What one rank holds of one weight.

    `segments` are [start, stop) along the cut dimension of the whole weight, in the order in which they are stored;
    `row_bytes` are the bytes of one index of that dimension.
    """

    tensor: str
    rank: int
    segments: tuple[tuple[int, int], ...]
    row_bytes: int

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.segments) * self.row_bytes

    def offset(self, start: int) -> int:
        """Where index `start` of the whole weight is stored here."""
        before = 0
        for first, stop in self.segments:
            if first <= start < stop:
                return before + start - first
            before += stop - first
        raise KeyError(f"rank {self.rank} does not hold index {start} of {self.tensor}, only {self.segments}")


class Weight(NamedTuple):
    """A whole weight: `rows` indices of `row_bytes` along its cut dimension; not `cut`: every tensor rank has it all.

    `joined` weights lie one after the other in it, each cut by itself.
    """

    name: str
    rows: int
    row_bytes: int
    cut: bool = True
    joined: int = 1

    def segments(self, tp_rank: int, tp: int) -> tuple[tuple[int, int], ...]:
        """What tensor rank `tp_rank` of `tp` holds."""
        return tensor_segments(self.rows, self.joined if self.cut else 1, *((tp_rank, tp) if self.cut else (0, 1)))


def tensor_segments(rows: int, joined: int, tp_rank: int, tp: int) -> tuple[tuple[int, int], ...]:
    """Indices of tensor rank `tp_rank` of `tp` in a weight of `rows`, which is `joined` weights in a row."""
    length = rows // (joined * tp)
    return tuple(((part * tp + tp_rank) * length, (part * tp + tp_rank + 1) * length) for part in range(joined))


def weights_by_stage(
    spec: ModelSpec, layout: ParallelLayout, element_bytes: int, scalar_head: bool = False
) -> list[list[Weight]]:
    """The weights of each stage, whole."""
    return [
        list(_stage_weights(spec, layers, stage == 0, stage == layout.stages - 1, element_bytes, scalar_head))
        for stage, layers in enumerate(layout.stage_layers(spec.layers))
    ]


def _stage_weights(
    spec: ModelSpec, layers: range, first: bool, last: bool, element_bytes: int, scalar_head: bool
) -> Iterator[Weight]:
    hidden = spec.hidden * element_bytes
    if first:
        yield Weight("embedding.word_embeddings.weight", spec.padded_vocab, hidden)
    for layer in layers:
        yield from _layer_weights(spec, f"decoder.layers.{layer}.", element_bytes)
    if last:
        yield Weight("decoder.final_layernorm.weight", spec.hidden, element_bytes, cut=False)
        if scalar_head:
            yield Weight("output_layer.weight", 1, hidden, cut=False)
        elif not (spec.tied_embeddings and first):
            yield Weight("output_layer.weight", spec.padded_vocab, hidden)


def _layer_weights(spec: ModelSpec, layer: str, element_bytes: int) -> Iterator[Weight]:
    for weight in layer_weights(spec):
        cut, shapes = weight.cut or 0, list(weight.parts.values())
        rows = sum(shape[cut] for shape in shapes)
        row_bytes = sum(map(math.prod, shapes)) // rows * element_bytes
        joined = 1 if weight.grouped else len(shapes)
        yield Weight(layer + weight.name, rows, row_bytes, weight.cut is not None, joined)
