"""What guesses cost a decode step and give it, measured: steps are not tokens where an engine speculates.

A step of b sequences with g guesses gives each of them 1 + accepted / b tokens. The seconds of one token of each, which
is what a CostModel calls a decode step, are the step's seconds over these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.config.values import LARGEST
from rlhfuse.costs.fits import Line, check_seconds
from rlhfuse.costs.forms.form import DecodeRow

LEAST_SEQUENCES = 100  # of steps, that stand for one number of sequences; with fewer its neighbours count, too


@dataclass(frozen=True)
class DecodeObservation:
    """One decode step: sequences, tokens of context over all of them, seconds; guesses, and how many were drawn."""

    batch: int
    context_tokens: int
    seconds: float
    guesses: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Speculation:
    """Guesses in steps of 1, 2, ... sequences: how many each sequence had, and how many tokens a step gave it."""

    guess_seconds: float  # of one guess in a step
    guesses: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.guesses) != len(self.tokens) or not self.tokens:
            raise InputError("speculation needs guesses and tokens for the same numbers of sequences, one at least")
        check_seconds("seconds of a guess", self.guess_seconds)
        for least, values in ((1, self.tokens), (0, self.guesses)):
            if bad := [value for value in values if not least <= value <= LARGEST]:
                raise InputError(f"tokens and guesses of a step must be in [{least}, {LARGEST}], not {bad[0]!r:.40}")

    def __str__(self) -> str:
        """E.g. `1.20 us each; 1 sequence: 7.9 give 2.1 tokens a step, 8: 0.9 give 1.4`."""
        rows = ((n, self.guesses[n - 1], self.tokens[n - 1]) for n in sorted({1, len(self.tokens)}))
        gains = ", ".join(
            f"{n} sequences: {guesses:.1f} give {tokens:.2f} tokens a step" for n, guesses, tokens in rows
        )
        return f"{self.guess_seconds * 1e6:.2f} us each; {gains}"

    def decode_row(self, batch: float) -> DecodeRow:
        """Seconds that the guesses of a step of `batch` sequences add, and tokens that each sequence gains."""
        points = np.arange(1, len(self.tokens) + 2)
        guesses, tokens = (
            float(np.interp(batch, points, (*values, beyond)))
            for values, beyond in ((self.guesses, 0.0), (self.tokens, 1.0))
        )
        return DecodeRow(guessing=self.guess_seconds * guesses * batch, tokens=tokens)


def fit_decode(steps: Sequence[DecodeObservation]) -> tuple[Line, Speculation | None]:
    """Seconds of a plain step of (batch, context tokens), and what guesses do to it; None where there were none."""
    from scipy.optimize import isotonic_regression  # 0.3 s that most programs need not wait

    counts = [(step.batch, step.context_tokens, step.guesses) for step in steps]
    line = Line.fit(counts, [step.seconds for step in steps])
    *slopes, guess_seconds = line.slopes
    plain = Line(line.constant, tuple(slopes))
    most = max((step.batch for step in steps if step.guesses), default=0)
    if not most:
        return plain, None
    sums = np.zeros((most + 1, 3))  # by batch: sequences, guesses, tokens accepted
    for step in steps:
        if step.batch <= most:
            sums[step.batch] += step.batch, step.guesses, step.accepted
    means = [_near(sums, batch) for batch in range(1, most + 1)]
    # More sequences share the rows: what noise says against it would let the best batch jump about. Neighbours are
    # pooled; were it the least so far, a last sample that is hard to guess would stand for every batch.
    tokens = isotonic_regression([1 + accepted for _, accepted in means], weights=sums[1:, 0] + 1, increasing=False).x
    return plain, Speculation(guess_seconds, tuple(g for g, _ in means), tuple(map(float, tokens)))


def _near(sums: np.ndarray, batch: int) -> tuple[float, float]:
    """Guesses and accepted tokens of a sequence in a step of about `batch`."""
    width = 0
    while True:
        sequences, guesses, accepted = map(float, sums[max(1, batch - width) : batch + width + 1].sum(axis=0))
        if sequences >= LEAST_SEQUENCES or width >= len(sums):
            return guesses / sequences, accepted / sequences
        width += 1
