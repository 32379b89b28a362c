"""Seconds as a function of counts: a straight line through observations, or a grid of measured points.

More work never costs less: a line's coefficients are not negative, and a grid's values ascend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numba.extending import register_jitable

from rlhfuse.base.errors import InputError

MOST_SECONDS = 1e9  # of one piece of work, 31 years


def check_seconds(what: str, *values: float) -> None:
    """Raise InputError unless all are finite and not negative, and sums of them stay so."""
    if bad := [value for value in values if not 0 <= value <= MOST_SECONDS]:
        raise InputError(f"{what} must be in [0, {MOST_SECONDS:g}], not {bad[0]!r:.40}")


@dataclass(frozen=True)
class Line:
    """seconds = constant + sum(slope x count); all coefficients are >= 0."""

    constant: float
    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        check_seconds("a line's constant and slopes", self.constant, *self.slopes)

    def __call__(self, *counts: float) -> float:
        return self.constant + sum(slope * count for slope, count in zip(self.slopes, counts, strict=True))

    @staticmethod
    def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> Line:
        """Non-negative least squares over a constant and the columns of `counts` [observations, columns].

        Residuals sum to zero while the constant is in use: predicted totals are unbiased over the work that was seen.
        """
        from scipy.optimize import nnls  # 0.3 s that most programs need not wait

        target = np.asarray(seconds, dtype=np.float64)
        matrix = np.column_stack([np.ones(len(target)), np.asarray(counts, dtype=np.float64).reshape(len(target), -1)])
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        basis, reduced = np.linalg.qr(matrix / scale)  # thousands of observations become a problem of a few rows
        coefficients = nnls(reduced, basis.T @ target)[0] / scale
        return Line(float(coefficients[0]), tuple(float(slope) for slope in coefficients[1:]))

    def describe(self, *names: str) -> str:
        """E.g. `12.0 us + 3.1 us x batch`."""
        slopes = "".join(f" + {slope * 1e6:.4g} us x {name}" for slope, name in zip(self.slopes, names, strict=True))
        return f"{self.constant * 1e6:.1f} us{slopes}"


@dataclass(frozen=True)
class Grid:
    """`seconds[i * len(axes[1]) + j]` were measured at (axes[0][i], axes[1][j]); one axis or two.

    Between points the seconds are interpolated along straight lines; before the first they stay. Beyond the end of an
    axis they rise as steeply as for any smaller count of the other.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not axis or list(axis) != sorted(set(axis)):
                raise InputError(f"points {axis} of a grid must ascend, and be at least one")
        if len(self.axes) not in (1, 2) or len(self.seconds) != math.prod(map(len, self.axes)):
            raise InputError(f"a grid of {[len(axis) for axis in self.axes]} points needs as many seconds")
        check_seconds("seconds of a grid", *self.seconds)

    @cached_property
    def points(self) -> tuple[float, ...]:
        """The axes, one after the other, and the seconds."""
        return (*chain(*self.axes), *self.seconds)

    @property
    def shape(self) -> tuple[int, int]:
        """Points of the first axis and of the second, 0 without one."""
        return len(self.axes[0]), len(self.axes[1]) if len(self.axes) > 1 else 0

    def __call__(self, *counts: float) -> float:
        return grid_seconds(self.points, 0, *self.shape, counts[0], counts[-1])

    def describe(self) -> str:
        """Its ends, e.g. `1.200 ms at (1, 64) to 9.500 ms at (64, 512)`."""
        first = ", ".join(f"{axis[0]:g}" for axis in self.axes)
        last = ", ".join(f"{axis[-1]:g}" for axis in self.axes)
        return f"{self.seconds[0] * 1e3:.3f} ms at ({first}) to {self.seconds[-1] * 1e3:.3f} ms at ({last})"


@register_jitable(error_model="numpy", _nrt=False)
def grid_seconds(points, start, rows, columns, first, second):
    """A grid's seconds at two counts, or at the first without `columns`; it lies in `points` from `start` on."""
    row, weight = _cell(points, start, rows, first)
    following, table = min(row + 1, rows - 1), start + rows + columns
    if columns == 0:
        low, high = points[table + row], points[table + following]
        return max(0.0, low + weight * (high - low))
    column, other = _cell(points, start + rows, columns, second)
    low = _seconds_in_row(points, table, columns, row, column, other)
    high = _seconds_in_row(points, table, columns, following, column, other)
    if weight <= 1:
        return low + weight * (high - low)
    steepest = high - low
    for below in range(column + 1):
        at = table + below
        steepest = max(steepest, points[at + following * columns] - points[at + row * columns])
    return high + (weight - 1) * steepest


@register_jitable(error_model="numpy", _nrt=False)
def _seconds_in_row(points, table, columns, row, column, weight):
    following, at = min(column + 1, columns - 1), table + row * columns
    if weight <= 1:
        return points[at + column] + weight * (points[at + following] - points[at + column])
    steepest = points[at + following] - points[at + column]
    for above in range(row):
        at = table + above * columns
        steepest = max(steepest, points[at + following] - points[at + column])
    return points[table + row * columns + following] + (weight - 1) * steepest


@register_jitable(error_model="numpy", _nrt=False)
def _cell(points, start, length, count):
    """(index, weight): `count` is weight of the way from that point of an axis to the next; beyond 1 past the end."""
    if length == 1 or count <= points[start]:
        return 0, 0.0
    index = 0
    while index < length - 2 and points[start + index + 1] <= count:
        index += 1
    return index, (count - points[start + index]) / (points[start + index + 1] - points[start + index])
