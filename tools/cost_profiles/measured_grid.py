"""Grids of measurements, of which the time allowed a part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.costs.fits import Grid, Line


def grid_of(axes: Sequence[Sequence[float]], measured: Mapping[tuple[float, ...], float]) -> Grid:
    """A grid of what was measured at some of its points; the others lie on a straight line through those that were.

    The line is that of the counts and, of two, their product. A value below a smaller count's, which is noise, is
    raised to it. Raises InputError where nothing was measured.
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


def _terms(point: Sequence[float]) -> tuple[float, ...]:
    return tuple(point) if len(point) == 1 else (*point, math.prod(point))
