"""Straight lines through observations, and one line for every neighbour.

The fit is non-negative least squares. With at most three columns every subset of them can be tried, which is
exact and has no iteration to converge. Residuals sum to zero while the constant is in use, so predicted totals
are unbiased over the mix of work that was seen.

Knows nothing of what is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfuse.costs.analytic import NEIGHBOURS, check_neighbour
from rlhfuse.errors import InputError

FEW = 8  # so few observations beside a neighbour scale the line of all of them, and are not fitted alone
# The neighbours to ask instead, nearest first: what is busy resembles what is busy.
NEAREST = {
    "idle": ("idle", "decoding", "scoring"),
    "decoding": ("decoding", "scoring", "idle"),
    "scoring": ("scoring", "decoding", "idle"),
}


def nearest(neighbour: str, observed: Iterable[str]) -> str:
    """The neighbour among `observed`, of which there is at least one, that answers for `neighbour`."""
    known = set(observed)
    return next(name for name in NEAREST[neighbour] if name in known)


@dataclass(frozen=True)
class Line:
    """seconds = constant + sum(slope x count); all coefficients are >= 0."""

    constant: float
    slopes: tuple[float, ...]

    def __call__(self, *counts: float) -> float:
        return self.constant + sum(slope * count for slope, count in zip(self.slopes, counts, strict=True))

    def scaled(self, factor: float) -> Line:
        return Line(self.constant * factor, tuple(slope * factor for slope in self.slopes))

    @staticmethod
    def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> Line:
        """Non-negative least squares over a constant and the columns of `counts` [observations, columns].

        Of fits that are equally good, the one with the fewest terms is taken: with one observation, a slope or
        a constant alone.
        """
        target = np.asarray(seconds, dtype=np.float64)
        matrix = np.column_stack([np.ones(len(target)), np.asarray(counts, dtype=np.float64).reshape(len(target), -1)])
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        # what no combination of columns reaches is the same for all subsets: the rest is a problem of few rows
        basis, matrix = np.linalg.qr(matrix / scale)
        reached = basis.T @ target
        beyond = float(np.sum((target - basis @ reached) ** 2))
        best, best_error = np.zeros(matrix.shape[1]), float(target @ target)
        columns = range(matrix.shape[1])
        for size in range(1, len(columns) + 1):
            for chosen in itertools.combinations(reversed(columns), size):
                part = matrix[:, chosen]
                solution = np.linalg.lstsq(part, reached, rcond=1e-10)[0]
                if (solution < 0).any():
                    continue
                error = beyond + float(np.sum((part @ solution - reached) ** 2))
                if error < best_error * (1 - 1e-9):  # strictly better, not by rounding
                    best, best_error = np.zeros(len(columns)), error
                    best[list(chosen)] = solution / scale[list(chosen)]
        return Line(float(best[0]), tuple(float(value) for value in best[1:]))

    def to_dict(self) -> dict:
        return {"constant": self.constant, "slopes": list(self.slopes)}

    @staticmethod
    def from_dict(raw: dict, slopes: int, where: str) -> Line:
        """Inverse of `to_dict`. Raises InputError naming `where` unless it has `slopes` slopes, all >= 0."""
        line = Line(float(raw["constant"]), tuple(float(slope) for slope in raw["slopes"]))
        if len(line.slopes) != slopes or not all(0 <= c < float("inf") for c in (line.constant, *line.slopes)):
            raise InputError(f"{where} needs a constant and {slopes} slopes, finite and >= 0")
        return line


@dataclass(frozen=True)
class LineTable:
    """The line of one kind of work beside each neighbour that it was observed beside; at least one."""

    lines: tuple[tuple[str, Line], ...]  # in the order of NEIGHBOURS

    @staticmethod
    def everywhere(line: Line) -> LineTable:
        """The same line beside every neighbour."""
        return LineTable(tuple((neighbour, line) for neighbour in NEIGHBOURS))

    @staticmethod
    def fit(rows: Sequence[tuple[Sequence[float], float, str]]) -> LineTable:
        """A line for every neighbour in `rows` of (counts, seconds, neighbour).

        Beside a neighbour with fewer than FEW rows, the line through all rows is scaled to these rows' total.
        """
        whole = Line.fit([counts for counts, _, _ in rows], [seconds for _, seconds, _ in rows])
        lines = []
        for neighbour in NEIGHBOURS:
            seen = [(counts, seconds) for counts, seconds, beside in rows if beside == neighbour]
            if not seen:
                continue
            if len(seen) == len(rows):
                line = whole
            elif len(seen) >= FEW:
                line = Line.fit(*zip(*seen))
            else:
                predicted = sum(whole(*counts) for counts, _ in seen)
                line = whole.scaled(sum(seconds for _, seconds in seen) / predicted) if predicted > 0 else whole
            lines.append((neighbour, line))
        return LineTable(tuple(lines))

    def source(self, neighbour: str) -> str:
        """The neighbour whose line answers for `neighbour`: itself, or the nearest that was observed."""
        return nearest(neighbour, (name for name, _ in self.lines))

    def beside(self, neighbour: str) -> Line:
        return self._answers[neighbour]

    @cached_property
    def _answers(self) -> dict[str, Line]:
        """The line for every neighbour; a simulation asks thousands of times."""
        return {neighbour: dict(self.lines)[self.source(neighbour)] for neighbour in NEIGHBOURS}

    def describe(self, kind: str, names: Sequence[str]) -> list[str]:
        """One text line for each neighbour, which says where another one's line stands in; equal lines are one."""
        if len({line for _, line in self.lines}) == 1 and len(self.lines) == len(NEIGHBOURS):
            return [f"{kind:10s} {_text(self.lines[0][1], names)}"]
        rows = []
        for neighbour in NEIGHBOURS:
            source = self.source(neighbour)
            text = _text(self.beside(neighbour), names) if source == neighbour else f"as {source}: never observed"
            rows.append(f"{kind:10s} {f'({neighbour} neighbour)':20s} {text}")
        return rows

    def to_dict(self) -> dict:
        return {neighbour: line.to_dict() for neighbour, line in self.lines}

    @staticmethod
    def from_dict(raw: dict, slopes: int, where: str) -> LineTable:
        """Inverse of `to_dict`. Raises InputError naming `where` and the neighbour."""
        for name in raw:
            check_neighbour(name, where)
        known = [name for name in NEIGHBOURS if name in raw]
        read = [(name, Line.from_dict(raw[name], slopes, f"{where} beside {name}")) for name in known]
        if not read:
            raise InputError(f"{where} has no line; give one for at least one of {', '.join(NEIGHBOURS)}")
        return LineTable(tuple(read))

    @staticmethod
    def from_line(raw: dict, slopes: int, where: str) -> LineTable:
        """One line, as version 1 of the file had it, for every neighbour."""
        return LineTable.everywhere(Line.from_dict(raw, slopes, where))


def _text(line: Line, names: Sequence[str]) -> str:
    slopes = "".join(f" + {slope * 1e6:.4g} us x {name}" for slope, name in zip(line.slopes, names))
    return f"{line.constant * 1e6:.1f} us{slopes}"
