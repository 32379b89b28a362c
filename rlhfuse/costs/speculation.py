"""What guesses cost a decode step and give it, measured: steps are not tokens where an engine speculates.

A step of b sequences with g guesses gives each of them 1 + accepted / b tokens. The seconds of one token of each, which
is what a CostTable calls a decode step, are the step's seconds over these tokens. `GuessRows` compares them with those
of plain steps while an engine runs; `fit_steps` puts both into a price afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST
from rlhfuse.costs.fits import Line, check_seconds
from rlhfuse.costs.forms.form import DecodeRow

LEAST_SEQUENCES = 100  # of steps, that stand for one number of sequences; with fewer its neighbours count, too
LEAST_STEPS, MOST_STEPS = 4, 16  # of a kind, that are compared: with fewer nothing is known, older ones are forgotten
HOPELESS_STEPS = 2  # without a guess that was right, after which no seconds need be compared
LEAST_GAIN = 1.03  # times as fast, below which guesses are off: tables that grow cost a little more, now and then
PLAIN_EVERY = 16  # steps with guesses, among which one is run without
SHORTEST_WAIT, LONGEST_WAIT = 128, 1024  # steps before guesses that are off are tried again; each is twice the last
SOONER = 4  # times, where none was right: what is drawn later may repeat itself
AGREE_EVERY = 8  # steps
DRAFT_BYTES = 64 << 20  # of tables to guess from, at most
DRAFT_BYTES_A_TOKEN = 160  # 1.2 suffixes and 2 pairs in tables half full, and the token itself
DRAFT_ITERATIONS = 6  # before the running one, that are guessed from


def guess_bytes(tokens: int) -> int:
    """Bytes of a rank's n-gram tables, where an iteration generates `tokens` tokens (gen/speculation/guesser.py)."""
    return min(DRAFT_BYTES, DRAFT_BYTES_A_TOKEN * (1 + DRAFT_ITERATIONS) * tokens)


class StepObservation(NamedTuple):
    """One step: sequences, tokens of context over all of them, tokens of those that did not decode, seconds; guesses,
    and how many were drawn."""

    batch: int
    context_tokens: int
    prefill_tokens: int
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


class SearchedStep(NamedTuple):
    """A decode step for which guesses were looked for: whether it had some, seconds, tokens that each sequence got."""

    guessed: bool
    seconds: float
    tokens: float


@dataclass
class StepSpeeds:
    """The last decode steps of about so many sequences; seconds are in units of what such a step roughly takes."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))  # seconds; nobody looked for guesses
    searched: deque[SearchedStep] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    asked: int = 0  # steps that could have had guesses
    off: bool = False
    wait: int = SHORTEST_WAIT
    again: int = 0  # the step with which guesses are tried again

    @property
    def known(self) -> bool:
        return min(len(self.plain), len(self.searched)) >= LEAST_STEPS

    def parts(self) -> tuple[float, float]:
        """Seconds of a step that guesses are looked for, in those of another, and the tokens that it gives a sequence.

        Medians, as a step may wait for anything, but apart for what was found and what was sought in vain.
        """
        kinds = [[step.seconds for step in self.searched if step.guessed is kind] for kind in (False, True)]
        seconds = sum(len(kind) * median(kind) for kind in kinds if kind) / len(self.searched)
        return seconds / median(self.plain), self._tokens

    @property
    def hopeless(self) -> bool:
        """Whether no guess was right lately, if there were any."""
        return sum(step.guessed for step in self.searched) >= HOPELESS_STEPS and self._tokens == 1

    @property
    def _tokens(self) -> float:
        """That a step for which guesses are looked for gives each sequence."""
        return fmean(step.tokens for step in self.searched)

    def pays(self) -> bool:
        """Whether a token of each sequence takes less time with guesses; supposed until both kinds are known."""
        if self.hopeless:
            return False
        if not self.known:
            return True
        seconds, tokens = self.parts()
        return tokens >= LEAST_GAIN * seconds

    def guesses_next(self) -> bool:
        """Whether the coming step may have guesses: by counts and `off`, no clock."""
        self.asked += 1
        if self.off and self.asked >= self.again:
            self.off = False
            self.searched.clear()
        if self.off or self.known:
            return not self.off and self.asked % PLAIN_EVERY > 0
        return len(self.searched) <= len(self.plain)

    def turn(self, off: bool) -> None:
        if off and not self.off:
            self.again = self.asked + (self.wait // SOONER if self.hopeless else self.wait)
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        self.off = off


class GuessRows:
    """Rows that a decode step may fill, sequences and guesses together: all, or 0 where guesses do not pay.

    Steps with and without guesses are compared as they are measured, apart for 1, 2, 3-4, 5-8, ... sequences.
    """

    def __init__(self, rows: int, price: Callable[[int, int], float], agree: Callable[[int], int] = int) -> None:
        """`price`: of a step of (sequences, 0 guesses), roughly, in any unit.

        `agree`: returns one rank's number on all ranks of an engine, which call it at the same steps; 64 bits.
        """
        self.most, self._price, self._agree = rows, price, agree
        self._speeds = [StepSpeeds() for _ in range(rows.bit_length() + 1)]
        self._observed = 0

    def rows(self, sequences: int) -> int:
        """Rows of the coming step of so many sequences, of which there is one for each call."""
        if sequences >= self.most:
            return 0
        return self.most if self._speeds[_size_class(sequences)].guesses_next() else 0

    def observe(self, step: StepObservation, searched: bool) -> None:
        """Take in what a decode step took and gave; now and then, decide anew: the same on all ranks.

        `searched`: guesses were looked for, and found or not.
        """
        if not 0 < step.batch < self.most:
            return
        speeds = self._speeds[_size_class(step.batch)]
        seconds = step.seconds / self._price(step.batch, 0)
        if searched:
            speeds.searched.append(SearchedStep(step.guesses > 0, seconds, 1 + step.accepted / step.batch))
        else:
            speeds.plain.append(seconds)
        self._observed += 1
        count = len(speeds.searched)
        first = count == LEAST_STEPS or (count < LEAST_STEPS and speeds.hopeless)  # by no clock: all ranks do the same
        if (searched and first) or self._observed % AGREE_EVERY == 0:
            off = self._agree(sum(1 << number for number, speeds in enumerate(self._speeds) if not speeds.pays()))
            for number, speeds in enumerate(self._speeds):
                speeds.turn(bool(off >> number & 1))


def _size_class(sequences: int) -> int:
    """0, 1, 2, 3, ... for 1, 2, 3 to 4, 5 to 8, ... sequences."""
    return (sequences - 1).bit_length()


class StepCosts(NamedTuple):
    """Seconds of a decode step without guesses, of (batch, context tokens), and of a prefill, of (tokens, sequences);
    what guesses do, None where there were none."""

    decode: Line
    prefill: Line
    speculation: Speculation | None


def fit_steps(steps: Sequence[StepObservation]) -> StepCosts:
    """One line through all steps, as prefills run beside sequences that decode: what one has takes as long in both.

        seconds = step + batch + context + guesses, and with a prefill: prefill + its tokens

    Raises InputError without a step that has a prefill, or has none.
    """
    prefills = sum(step.prefill_tokens > 0 for step in steps)
    if not 0 < prefills < len(steps):
        raise InputError(f"no {'decode' if prefills else 'prefill'} step to fit costs to; measure at least one")
    counts = [(s.batch, s.context_tokens, s.guesses, s.prefill_tokens > 0, s.prefill_tokens) for s in steps]
    line = Line.fit(counts, [step.seconds for step in steps])
    row, context, guess_seconds, prefill, token = line.slopes
    lines = Line(line.constant, (row, context)), Line(line.constant + prefill, (token + context, row))
    return StepCosts(*lines, _fit_guesses(steps, guess_seconds))


def _fit_guesses(steps: Sequence[StepObservation], guess_seconds: float) -> Speculation | None:
    """What guesses of so many seconds each gave; None where there were none."""
    from scipy.optimize import isotonic_regression  # 0.3 s that most programs need not wait

    steps = [step for step in steps if not step.prefill_tokens]
    most = max((step.batch for step in steps if step.guesses), default=0)
    if not most:
        return None
    sums = np.zeros((most + 1, 3))  # by batch: sequences, guesses, tokens accepted
    for step in steps:
        if step.batch <= most:
            sums[step.batch] += step.batch, step.guesses, step.accepted
    means = [_near(sums, batch) for batch in range(1, most + 1)]
    # More sequences share the rows: what noise says against it would let the best batch jump about. Neighbours are
    # pooled; were it the least so far, a last sample that is hard to guess would stand for every batch.
    tokens = isotonic_regression([1 + accepted for _, accepted in means], weights=sums[1:, 0] + 1, increasing=False).x
    return Speculation(guess_seconds, tuple(g for g, _ in means), tuple(map(float, tokens)))


def _near(sums: np.ndarray, batch: int) -> tuple[float, float]:
    """Guesses and accepted tokens of a sequence in a step of about `batch`."""
    width = 0
    while True:
        sequences, guesses, accepted = map(float, sums[max(1, batch - width) : batch + width + 1].sum(axis=0))
        if sequences >= LEAST_SEQUENCES or width >= len(sums):
            return guesses / sequences, accepted / sequences
        width += 1
