"""Forms of what a piece of work costs: rooflines, grids and lines, one after the other.

The functions take parts as they are, and inside of compiled kernels as records of one array, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numba.extending import register_jitable

from rlhfuse.costs.fits import Grid, Line, grid_seconds
from rlhfuse.costs.forms.roofline import Roofline, decode_layer_seconds, forward_seconds

MODEL, GRID, LINE = range(3)  # kinds of parts


class GridPart(NamedTuple):
    """Where a grid lies in its form's points: its axes, then its seconds."""

    share: float  # least part of an instance's batch that one replica takes
    start: int
    rows: int
    columns: int  # 0: it has one axis
    kind: int = GRID


class LinePart(NamedTuple):
    """Seconds = constant + first x a count + second x another; of bytes, over so many links."""

    constant: float
    first: float
    second: float = 0.0
    ranks: float = 1.0  # that send their parts at the same time
    bandwidth: float = 1.0  # of each
    kind: int = LINE


class DecodeRow(NamedTuple):
    """What a decode step of so many sequences has beside its form."""

    all_reduce: float = 0.0  # seconds of a layer
    head: float = 0.0  # seconds
    sampler: float = 0.0  # seconds
    guessing: float = 0.0  # seconds
    tokens: float = 1.0  # that a sequence gains: more than one with guesses


class Form(NamedTuple):
    """Seconds of counts: the sum over all parts."""

    parts: Sequence[Roofline | GridPart | LinePart]
    points: Sequence[float] = ()

    @staticmethod
    def of_line(line: Line) -> Form:
        first, second = (*line.slopes, 0.0)[:2]
        return Form((LinePart(line.constant, first, second),))

    @staticmethod
    def of_grids(grids: Sequence[tuple[float, Grid]]) -> Form:
        """Grids, each with the least share of a batch that one replica takes."""
        parts, points = [], []
        for share, grid in grids:
            parts.append(GridPart(share, len(points), *grid.shape))
            points += grid.points
        return Form(parts, points)


def _record_type(*rows: type) -> np.dtype:
    """Fields of all these named tuples."""
    fields = {name: kind for row in rows for name, kind in get_type_hints(row).items()}
    return np.dtype(list(fields.items()), align=True)


PART, DECODE_ROW = _record_type(Roofline, GridPart, LinePart), _record_type(DecodeRow)


def records(dtype: np.dtype, rows: Sequence[Any]) -> np.ndarray:
    """Named tuples as an array; fields that one lacks are 0."""
    array = np.zeros(len(rows), dtype)
    for place, row in enumerate(rows):
        for name, value in row._asdict().items():
            array[name][place] = value
    return array


@register_jitable(error_model="numpy", _nrt=False)
def packed_seconds(parts, first, after, points, tokens, sequences):
    """Forward over a packed batch of an instance; replicas that fit into it share the batch, a sequence at least."""
    if tokens <= 0:
        return 0.0
    total, most = 0.0, min(1.0, 1 / max(sequences, 1.0))
    for n in range(first, after):
        part = parts[n]
        if part.kind == LINE:
            total += part.constant + (part.first * tokens + part.second * sequences)
            continue
        share = max(part.share, most)
        own, packed = tokens * share, sequences * share
        if part.kind == MODEL:
            outputs = own * part.outputs_per_token + packed * part.outputs_per_sequence
            total += forward_seconds(part, own, packed, outputs)
        else:
            total += grid_seconds(points, part.start, part.rows, part.columns, own, packed)
    return total


@register_jitable(error_model="numpy", _nrt=False)
def decode_seconds(part, points, row, batch, context_tokens):
    """Seconds in which each of `batch` sequences gains a token; they hold `context_tokens` in all."""
    if part.kind == LINE:
        step = part.constant + (part.first * batch + part.second * context_tokens)
    elif part.kind == MODEL:
        layer = decode_layer_seconds(part, batch, context_tokens, row.all_reduce)
        step = part.layers * layer + row.head + row.sampler
    else:
        step = grid_seconds(points, part.start, part.rows, part.columns, batch, context_tokens / batch)
    return (step + row.guessing) / row.tokens


@register_jitable(error_model="numpy", _nrt=False)
def transfer_seconds(parts, first, after, points, kv_bytes):
    """Seconds of a transfer of so many bytes."""
    if kv_bytes <= 0:
        return 0.0
    total = 0.0
    for n in range(first, after):
        part = parts[n]
        if part.kind == LINE:
            total += part.constant + part.first * kv_bytes / part.ranks / part.bandwidth
        else:
            total += grid_seconds(points, part.start, part.rows, part.columns, kv_bytes, 0.0)
    return total
