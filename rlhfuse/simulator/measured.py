"""The CostModel of a running job: straight lines through what it measured.

Each kind of work is linear in a few counts, with coefficients that cannot be negative:

    decode step = a + b x batch + c x context tokens        prefill, scoring = a + b x tokens + c x sequences
    migration   = a + b x bytes                             swap-in = its median

The fit is non-negative least squares. With at most three columns every subset of them can be tried, which is
exact and has no iteration to converge. Residuals sum to zero while the constant is in use, so predicted totals
are unbiased over the mix of work that was seen.

Knows nothing of models or layouts. Paper section 4.2 (the threshold is refined while training runs).
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Sequence

import numpy as np

from rlhfuse.errors import InputError


@dataclass(frozen=True)
class DecodeObservation:
    """One decode step: sequences, tokens of context over all of them, seconds."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True)
class TokensObservation:
    """One packed forward (a prefill, or the scoring by all three models): tokens, sequences, seconds."""

    tokens: int
    sequences: int
    seconds: float


@dataclass(frozen=True)
class BytesObservation:
    """One transfer of keys and values."""

    kv_bytes: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """seconds = constant + sum(slope x count); all coefficients are >= 0."""

    constant: float
    slopes: tuple[float, ...]

    def __call__(self, *counts: float) -> float:
        return self.constant + sum(slope * count for slope, count in zip(self.slopes, counts, strict=True))

    @staticmethod
    def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> "Line":
        """Non-negative least squares over a constant and the columns of `counts` [observations, columns].

        Of fits that are equally good, the one with the fewest terms is taken: with one observation, a slope or
        a constant alone.
        """
        target = np.asarray(seconds, dtype=np.float64)
        matrix = np.column_stack([np.ones(len(target)), np.asarray(counts, dtype=np.float64).reshape(len(target), -1)])
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        best, best_error = np.zeros(matrix.shape[1]), float(target @ target)
        columns = range(matrix.shape[1])
        for size in range(1, len(columns) + 1):
            for chosen in itertools.combinations(reversed(columns), size):
                part = matrix[:, chosen] / scale[list(chosen)]
                solution = np.linalg.lstsq(part, target, rcond=1e-10)[0]
                if (solution < 0).any():
                    continue
                error = float(np.sum((part @ solution - target) ** 2))
                if error < best_error * (1 - 1e-9):  # strictly better, not by rounding
                    best, best_error = np.zeros(len(columns)), error
                    best[list(chosen)] = solution / scale[list(chosen)]
        return Line(float(best[0]), tuple(float(value) for value in best[1:]))


@dataclass(frozen=True)
class MeasuredCost:
    """A CostModel of one generation instance, fitted to observations; prints and saves as JSON."""

    decode: Line  # of batch, context tokens
    prefill: Line  # of tokens, sequences
    score: Line  # of tokens, sequences; all three models
    migration: Line  # of bytes
    swap_in: float  # seconds

    @staticmethod
    def fit(
        decode: Sequence[DecodeObservation],
        prefill: Sequence[TokensObservation],
        score: Sequence[TokensObservation],
        migration: Sequence[BytesObservation],
        swap_in: Sequence[float],
    ) -> "MeasuredCost":
        """Fit every line. Raises InputError naming the kind without observations or with a bad number.

        A job that never migrated measures one transfer and one swap-in at start (as profiling does) or keeps
        the lines of its previous fit: nothing is guessed here.
        """
        kinds = {"decode": decode, "prefill": prefill, "score": score, "migration": migration, "swap_in": swap_in}
        for kind, seen in kinds.items():
            if not len(seen):
                raise InputError(f"no {kind} observation to fit costs from; measure at least one")
            for one in seen:
                seconds = one if kind == "swap_in" else one.seconds
                if not (np.isfinite(seconds) and seconds >= 0):
                    raise InputError(f"{kind} observation {one}: seconds must be finite and >= 0")
        return MeasuredCost(
            decode=Line.fit([(o.batch, o.context_tokens) for o in decode], [o.seconds for o in decode]),
            prefill=Line.fit([(o.tokens, o.sequences) for o in prefill], [o.seconds for o in prefill]),
            score=Line.fit([(o.tokens, o.sequences) for o in score], [o.seconds for o in score]),
            migration=Line.fit([(o.kv_bytes,) for o in migration], [o.seconds for o in migration]),
            swap_in=float(np.median(np.asarray(swap_in))),
        )

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        return self.prefill(tokens, sequences) if tokens > 0 else 0.0

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self.decode(batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        return self.score(tokens, sequences) if tokens > 0 else 0.0

    def swap_in_seconds(self) -> float:
        return self.swap_in

    def migration_seconds(self, kv_bytes: float) -> float:
        return self.migration(kv_bytes) if kv_bytes > 0 else 0.0

    def __str__(self) -> str:
        us = 1e6
        return "\n".join(
            (
                f"decode step  {self.decode.constant * us:.1f} us + {self.decode.slopes[0] * us:.3f} us x batch"
                f" + {self.decode.slopes[1] * us:.5f} us x context tokens",
                f"prefill      {self.prefill.constant * us:.1f} us + {self.prefill.slopes[0] * us:.3f} us x tokens"
                f" + {self.prefill.slopes[1] * us:.1f} us x sequences",
                f"scoring      {self.score.constant * us:.1f} us + {self.score.slopes[0] * us:.3f} us x tokens"
                f" + {self.score.slopes[1] * us:.1f} us x sequences",
                f"migration    {self.migration.constant * us:.1f} us + {self.migration.slopes[0] * us:.6f} us x bytes",
                f"swap-in      {self.swap_in * us:.1f} us",
            )
        )

    def to_dict(self) -> dict:
        return {"version": 1, **asdict(self)}

    @staticmethod
    def from_dict(raw: dict, where: str = "measured costs") -> "MeasuredCost":
        """Inverse of `to_dict`. Raises InputError naming `where` and the field."""
        columns = {"decode": 2, "prefill": 2, "score": 2, "migration": 1}
        try:
            if raw["version"] != 1:
                raise InputError(f"{where}: version is {raw['version']!r}; only 1 is known")
            lines = {}
            for name, count in columns.items():
                line = Line(float(raw[name]["constant"]), tuple(float(slope) for slope in raw[name]["slopes"]))
                if len(line.slopes) != count or not all(0 <= c < float("inf") for c in (line.constant, *line.slopes)):
                    raise InputError(f"{where}: {name} needs a constant and {count} slopes, finite and >= 0")
                lines[name] = line
            return MeasuredCost(**lines, swap_in=float(raw["swap_in"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            known = ", ".join(field.name for field in fields(MeasuredCost))
            raise InputError(f"{where}: {error} is missing or no number; needed are version, {known}") from None


def load_measured_cost(path: str | Path) -> MeasuredCost:
    """Read what `save_measured_cost` wrote. Raises InputError naming the file."""
    try:
        raw = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise InputError(f"cost file {path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"cost file {path} is not valid JSON: {error}") from None
    return MeasuredCost.from_dict(raw, str(path))


def save_measured_cost(costs: MeasuredCost, path: str | Path) -> None:
    """Write beside and rename."""
    beside = Path(f"{path}.tmp")
    beside.write_text(json.dumps(costs.to_dict(), indent=1) + "\n")
    os.replace(beside, path)
