"""Whether a run learned: the score of its first iterations beside that of its last, in standard errors.

An average's standard error is the larger of two: from the spread of the samples within an iteration, and from that of
the iterations' means, which differ by their prompts too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfuse.monitor.phase_times import number

MOST_ITERATIONS = 5  # at each end that are averaged; of a short run half of them
ENOUGH = 3.0  # standard errors that chance alone rarely makes
MOVED = 1e-4  # nats per token of KL below which a model is as it was
BESIDE = {  # metric -> what it is called, format, what it means
    "actor/ref_kl": (
        "KL to the reference",
        "{:.4f}",
        "how far it has moved from the model it began as; 0: not at all",
    ),
    "response_length/mean": ("tokens of a response", "{:.1f}", "tokens are words or parts of words"),
    "response_length/clip_ratio": ("responses cut", "{:.1%}", "those that met the length limit before their end"),
}
Row = Mapping[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class Average:
    """A mean and its standard error, None where the run kept no spread."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.error:.3f}" if self.error is not None else "")

    @staticmethod
    def of(rows: Sequence[Row]) -> Average:
        """Average the training score over these iterations, one or more."""
        means = [row["critic/score/mean"] for row in rows]
        spreads = [(number(row.get("critic/score/std")), len(row.get("lengths/output") or ())) for row in rows]
        found = [statistics.stdev(means) / math.sqrt(len(means))] if len(means) > 1 else []
        if all(count and std is not None for std, count in spreads):
            found.append(math.sqrt(sum(std**2 / count for std, count in spreads if std)) / len(means))
        return Average(statistics.mean(means), max(found, default=None))


@dataclass(frozen=True)
class Learning:
    """`scores`: of the training prompts at both ends, `ends`: the iterations averaged there, as many each. `held_out`:
    of prompts that are not trained on, by the first and the last evaluation, or by the only one."""

    scores: tuple[Average, Average] | None
    ends: tuple[Sequence[Row], Sequence[Row]]
    held_out: tuple[Average, ...]

    @staticmethod
    def of(rows: Sequence[Row], evaluations: Sequence[Row]) -> Learning:
        """Iterations without a finite score are left out."""
        known = [row for row in rows if number(row.get("critic/score/mean")) is not None]
        count = min(MOST_ITERATIONS, len(known) // 2)
        first, last = known[:count], known[len(known) - count :]
        tested = [(number(row["val/score/mean"]), number(row.get("val/score/std_error"))) for row in evaluations]
        finite = [Average(mean, error) for mean, error in tested if mean is not None]
        held_out = (*finite[:1], *finite[1:][-1:])
        return Learning((Average.of(first), Average.of(last)) if count else None, (first, last), held_out)

    def sentences(self, learning_rate: float | None) -> list[str]:
        """The answer in words; held-out prompts first, because a model may learn its training prompts by heart."""
        said = [f"The score of held-out prompts is {one}, by one evaluation." for one in self.held_out[:1]]
        if len(self.held_out) > 1:
            first, last = self.held_out
            said = [_verdict("score of held-out prompts", first, last, "first evaluation", "last")]
        if not self.scores:
            unknown = "Not to be told yet: it takes two iterations with a score to compare."
            return [*said, *([unknown] if len(self.held_out) < 2 else [])]
        count = len(self.ends[0])
        names = (f"first {count} iterations", f"last {count}") if count > 1 else ("first iteration", "last")
        said.append(_verdict("score", *self.scores, *names))
        moved = [kl for row in self.ends[1] if (kl := number(row.get("actor/ref_kl"))) is not None]
        if moved and max(map(abs, moved)) < MOVED:
            rate = f" of {learning_rate:g}" if learning_rate is not None else ""
            said.append(f"The model has hardly moved at all: a learning rate{rate} (actor.optim.lr) may be too small.")
        return said

    def beside(self) -> list[tuple[str, str, str, str]]:
        """What changed with the score: name, at the first, at the last iterations, meaning."""
        found = []
        for metric, (name, form, meaning) in BESIDE.items():
            known = [[value for row in end if (value := number(row.get(metric))) is not None] for end in self.ends]
            if all(known):
                means = (round(statistics.mean(values), 4) + 0.0 for values in known)  # -0.0 is 0
                found.append((name, *map(form.format, means), meaning))
        return found


def _verdict(what: str, first: Average, last: Average, begin: str, end: str) -> str:
    change, error = last.mean - first.mean, math.hypot(first.error or 0.0, last.error or 0.0)
    facts = f"from {first} ({begin}) to {last} ({end})"
    if not error:
        return f"The {what} went {facts}; there is no spread to judge that by."
    size = f"That is {abs(change) / error:.1f} standard errors"
    if abs(change) < ENOUGH * error:
        return f"Not shown: the {what} went {facts}, a change of {change:+.3f}. {size}; chance alone makes as much."
    verdict = "Yes: the {} rose" if change > 0 else "No, it got worse: the {} fell"
    return f"{verdict.format(what)} by {abs(change):.3f}, {facts}. {size}."
