"""Stretches of whole parameters: what a rank owns of one, and how to put any part together from what others saved.

    whole parameter -cut along `dim` over tensor ranks-> a tensor rank's part -flat, cut over ZeRO-1 shards-> stretch

A `Place` says all of that in numbers, so a part of one layout can be filled from the stretches of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]
Read = Callable[[int, int], Tensor]  # flat values [start, stop) of one stored stretch, counted from its beginning


@dataclass(frozen=True)
class Place:
    """Flat stretch [start, stop) of the part that has `segments` ([start, stop) each, in the order stored) of `dim`."""

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    segments: tuple[tuple[int, int], ...]
    start: int
    stop: int

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Place:
        return Place(shape, 0, ((0, shape[0]),), 0, math.prod(shape))

    @staticmethod
    def from_list(row: list) -> Place:
        """Inverse of `to_list`. Raises ValueError for a place that cannot be."""
        shape, dim, segments, start, stop = row
        place = Place(tuple(shape), dim, tuple((first, last) for first, last in segments), start, stop)
        inside = 0 <= dim < len(shape) and all(0 <= first <= last <= shape[dim] for first, last in place.segments)
        if not inside or not 0 <= start < stop <= math.prod(place.part_shape):
            raise ValueError(f"{row} is no part of a parameter")
        return place

    def to_list(self) -> list:
        """As JSON has it."""
        return [list(self.shape), self.dim, [list(segment) for segment in self.segments], self.start, self.stop]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the whole part that this is a stretch of."""
        return (*self.shape[: self.dim], sum(b - a for a, b in self.segments), *self.shape[self.dim + 1 :])

    @property
    def rows(self) -> tuple[int, int]:
        """[first, last) rows of the part's dimension 0 that the stretch touches."""
        width = math.prod(self.part_shape[1:])
        return self.start // width, -(-self.stop // width)


class Fragment(NamedTuple):
    """One rank's stretch of one parameter: main weights, and Adam's moments once there are some; flat tensors."""

    name: str  # of the parameter, layers numbered over the whole model
    place: Place
    step: int  # of Adam; 0: it has no state yet
    tensors: Mapping[str, Tensor]  # kind -> [stop - start]

    def to_host(self) -> Fragment:
        """A copy that later steps do not change."""
        return self._replace(tensors={k: v.detach().to("cpu", copy=True) for k, v in self.tensors.items()})


def assemble(wanted: Place, stored: Iterable[tuple[Place, Read]], dtype: torch.dtype) -> Tensor:
    """Values of `wanted`, flat in host memory, from stretches that may overlap.

    Only rows that are needed are read. Raises ValueError when the shapes differ or values are missing.
    """
    first, last = wanted.rows
    inner = wanted.part_shape[1:]
    values = torch.empty((last - first, *inner), dtype=dtype)
    filled = torch.zeros(values.shape, dtype=torch.bool)
    for place, read in stored:
        if place.shape != wanted.shape:
            raise ValueError(f"shape {list(place.shape)} is stored, {list(wanted.shape)} is wanted")
        for overlap in _overlaps(wanted, place):
            _copy(values, filled, first, overlap, place, read)
    begin = wanted.start - first * math.prod(inner)
    stretch = slice(begin, begin + wanted.stop - wanted.start)
    if missing := int((~filled.flatten()[stretch]).sum()):
        raise ValueError(f"{missing} of {wanted.stop - wanted.start} values are not there")
    return values.flatten()[stretch]


class _Overlap(NamedTuple):
    """The same values in the wanted part (target) and the stored part (source); columns: dimension 1."""

    target_rows: Span
    source_rows: Span
    target_columns: Span
    source_columns: Span


def _overlaps(wanted: Place, place: Place) -> Iterator[_Overlap]:

    def cut(one: Place, dim: int) -> tuple[Span, ...]:
        size = one.shape[dim] if dim < len(one.shape) else 1
        return one.segments if one.dim == dim else ((0, size),)

    for rows in _matches(cut(wanted, 0), cut(place, 0), wanted.rows, place.rows):
        for columns in _matches(cut(wanted, 1), cut(place, 1)):
            yield _Overlap(*rows, *columns)


def _matches(
    targets: tuple[Span, ...],
    sources: tuple[Span, ...],
    target_limit: Span | None = None,
    source_limit: Span | None = None,
) -> Iterator[tuple[Span, Span]]:
    """Where indices that both have are stored, as stretches of equal length within the limits."""
    at = 0
    for t_first, t_last in targets:
        there = 0
        for s_first, s_last in sources:
            low, high = max(t_first, s_first), min(t_last, s_last)
            # distance from an index to where it is stored, on either side
            t_shift, s_shift = at - t_first, there - s_first
            if target_limit:
                low, high = max(low, target_limit[0] - t_shift), min(high, target_limit[1] - t_shift)
            if source_limit:
                low, high = max(low, source_limit[0] - s_shift), min(high, source_limit[1] - s_shift)
            if low < high:
                yield (low + t_shift, high + t_shift), (low + s_shift, high + s_shift)
            there += s_last - s_first
        at += t_last - t_first


def _copy(values: Tensor, filled: Tensor, first: int, overlap: _Overlap, place: Place, read: Read) -> None:
    """Take the stored rows in as far as the stretch has them; its first and last row may be there in part."""
    inner, (target_rows, source_rows, target_columns, source_columns) = place.part_shape[1:], overlap
    width = math.prod(inner)
    low, high = max(source_rows[0] * width, place.start), min(source_rows[1] * width, place.stop)
    rows = torch.empty((source_rows[1] - source_rows[0]) * width, dtype=values.dtype)
    there = torch.zeros(rows.shape, dtype=torch.bool)
    begin = low - source_rows[0] * width
    rows[begin : begin + high - low] = read(low - place.start, high - place.start).to(values.dtype)
    there[begin : begin + high - low] = True
    rows, there = rows.view(-1, *inner), there.view(-1, *inner)
    into = values[target_rows[0] - first : target_rows[1] - first]
    known = filled[target_rows[0] - first : target_rows[1] - first]
    if inner:
        rows, there = rows[:, slice(*source_columns)], there[:, slice(*source_columns)]
        into, known = into[:, slice(*target_columns)], known[:, slice(*target_columns)]
    into.copy_(torch.where(there, rows, into))
    known |= there
