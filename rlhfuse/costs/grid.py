"""Seconds measured on a grid of counts, and what lies between the points.

Between points the seconds are interpolated along straight lines in every direction; beyond the last point they
go on at least as they came there; before the first they stay. More work never costs less: a measured value that lies
below a smaller count's, which is noise, is raised to it.

Knows nothing of what the counts are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rlhfuse.costs.lines import Line
from rlhfuse.errors import InputError


@dataclass(frozen=True)
class Grid:
    """`seconds[i * len(axes[1]) + j]` were measured at (axes[0][i], axes[1][j]); one axis or two.

    Beyond the end of one axis it rises as steeply as it does for any smaller count of the other, so that more work
    never costs less there either.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not axis or list(axis) != sorted(set(axis)):
                raise InputError(f"points {axis} of a grid must ascend, and be at least one")
        if len(self.axes) not in (1, 2) or len(self.seconds) != math.prod(map(len, self.axes)):
            raise InputError(f"a grid of {[len(axis) for axis in self.axes]} points needs as many seconds")
        if not all(0 <= value < math.inf for value in self.seconds):
            raise InputError("seconds of a grid must be finite and >= 0")

    def __call__(self, *counts: float) -> float:
        first, weight = _place(self.axes[0], counts[0])
        if len(self.axes) == 1:
            return self._along(first, weight, self.seconds)
        second, other = _place(self.axes[1], counts[1])
        following = min(first + 1, len(self.axes[0]) - 1)
        low, high = self._in_row(first, second, other), self._in_row(following, second, other)
        if weight <= 1:
            return low + weight * (high - low)
        below = (self._at(following, column) - self._at(first, column) for column in range(second + 1))
        return high + (weight - 1) * max(high - low, *below)

    def _at(self, row: int, column: int) -> float:
        return self.seconds[row * len(self.axes[1]) + column]

    def _in_row(self, row: int, index: int, weight: float) -> float:
        following = min(index + 1, len(self.axes[1]) - 1)
        if weight <= 1:
            return self._at(row, index) + weight * (self._at(row, following) - self._at(row, index))
        steepest = max(self._at(one, following) - self._at(one, index) for one in range(row + 1))
        return self._at(row, following) + (weight - 1) * steepest

    @staticmethod
    def _along(index: int, weight: float, values: Sequence[float]) -> float:
        following = values[index + 1] if index + 1 < len(values) else values[index]
        return max(0.0, values[index] + weight * (following - values[index]))

    @staticmethod
    def of(axes: Sequence[Sequence[float]], measured: Mapping[tuple[float, ...], float]) -> Grid:
        """From what was measured at some of the points; the others lie on a straight line through those that were.

        The line is that of the counts and, of two, their product. Raises InputError where nothing was measured.
        """
        points = list(product(*axes))
        known = [point for point in points if point in measured]
        if not known:
            raise InputError("nothing was measured; give more time")
        line = Line.fit([_terms(point) for point in known], [measured[point] for point in known])
        values = [measured.get(point, line(*_terms(point))) for point in points]
        table = np.asarray(values).reshape([len(axis) for axis in axes])
        for direction in range(table.ndim):
            table = np.maximum.accumulate(table, axis=direction)
        return Grid(tuple(tuple(map(float, axis)) for axis in axes), tuple(table.reshape(-1).tolist()))

    def to_dict(self) -> dict:
        return {"axes": [list(axis) for axis in self.axes], "seconds": list(self.seconds)}

    @staticmethod
    def from_dict(raw: dict, where: str) -> Grid:
        """Inverse of `to_dict`. Raises InputError naming `where`."""
        try:
            return Grid(tuple(tuple(map(float, axis)) for axis in raw["axes"]), tuple(map(float, raw["seconds"])))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where}: {error} is missing or no number; a grid has axes and seconds") from None


def _terms(point: Sequence[float]) -> tuple[float, ...]:
    return tuple(point) if len(point) == 1 else (*point, math.prod(point))


def _place(axis: Sequence[float], count: float) -> tuple[int, float]:
    """(index, weight): the point is weight of the way from axis[index] to the one after; beyond 1 past the end."""
    if len(axis) == 1 or count <= axis[0]:
        return 0, 0.0
    index = min(bisect_right(axis, count) - 1, len(axis) - 2)
    return index, (count - axis[index]) / (axis[index + 1] - axis[index])
