"""Stretches of whole parameters: what a rank owns of one, and how to put any part together from what others saved.

    whole parameter -cut along `dim` over tensor ranks-> a tensor rank's part -flat, cut over ZeRO-1 shards-> stretch

A `Place` says all of that in numbers, so a part of one layout can be filled from the stretches of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    def width(self) -> int:
        """Values of a row of the part's dimension 0."""
        return math.prod(self.part_shape[1:])

    @property
    def rows(self) -> tuple[int, int]:
        """[first, last) rows of the part's dimension 0 that the stretch touches."""
        return self.start // self.width, -(-self.stop // self.width)

    def indices(self, dim: int) -> np.ndarray:
        """Where along `dim` of the whole parameter, 0 or 1, the part's rows or columns lie, in the order stored."""
        if dim == self.dim:
            return np.concatenate([np.arange(first, last) for first, last in self.segments])
        return np.arange(self.shape[dim] if dim < len(self.shape) else 1)


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
    values = torch.empty((last - first, wanted.width), dtype=dtype)
    filled = torch.zeros(values.shape, dtype=torch.bool)
    for place, read in stored:
        if place.shape != wanted.shape:
            raise ValueError(f"shape {list(place.shape)} is stored, {list(wanted.shape)} is wanted")
        columns, begin = _common_runs(wanted.indices(1), place.indices(1)), place.rows[0]
        rows = _common_runs(wanted.indices(0)[first:last], place.indices(0)[slice(*place.rows)])
        for here, there in rows if columns else ():
            known, is_known = _read_rows(place, read, begin + there.start, begin + there.stop, dtype)
            for into, of in columns:
                target = values[here, into]
                target.copy_(torch.where(is_known[:, of], known[:, of], target))
                filled[here, into] |= is_known[:, of]
    begin = wanted.start - first * wanted.width
    stretch = slice(begin, begin + wanted.stop - wanted.start)
    if missing := int((~filled.flatten()[stretch]).sum()):
        raise ValueError(f"{missing} of {wanted.stop - wanted.start} values are not there")
    return values.flatten()[stretch]


def _common_runs(indices: np.ndarray, others: np.ndarray) -> list[tuple[slice, slice]]:
    """Runs of what stands in both, as places in the one and in the other."""
    _, here, there = np.intersect1d(indices, others, assume_unique=True, return_indices=True)
    breaks = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1)) + 1
    runs = zip(np.split(here, breaks), np.split(there, breaks)) if len(here) else ()
    return [(slice(int(a[0]), int(a[-1]) + 1), slice(int(b[0]), int(b[-1]) + 1)) for a, b in runs]


def _read_rows(place: Place, read: Read, low: int, high: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows low:high of a stored part, [rows, width], and which values the stretch has of its first and last row."""
    begin, end = max(low * place.width, place.start), min(high * place.width, place.stop)
    rows = torch.empty((high - low, place.width), dtype=dtype)
    there = torch.zeros(rows.shape, dtype=torch.bool)
    stretch = slice(begin - low * place.width, end - low * place.width)
    rows.view(-1)[stretch] = read(begin - place.start, end - place.start).to(dtype)
    there.view(-1)[stretch] = True
    return rows, there
