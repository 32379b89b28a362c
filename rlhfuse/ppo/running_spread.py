"""Mean and standard deviation of all scores so far, by which scores may be divided.

    after a batch with n scores of mean m and squares q about it, of N before with mean M and squares Q:
    squares <- Q + q + (m - M)^2 N n / (N + n),    mean <- M + (m - M) n / (N + n)       (Chan et al. 1979)

Reward scaling keeps the size of the advantages, and so of the value loss, alike whatever the reward's own unit is
(Engstrom et al. 2020, "Implementation matters", section 3; with one score per sample it is the scores that are
divided). The mean is not taken off: a sign keeps its meaning. Plain numbers, so that a checkpoint holds every bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LEAST = 1e-6  # scores that are all (nearly) equal have no size to divide by


@dataclass(frozen=True)
class RunningSpread:
    """What is known of `count` scores: their mean, and the sum of their squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, scores: Tensor) -> RunningSpread:
        """With one batch more; `scores` [N], in an order that is the same on every rank."""
        n, wide = len(scores), scores.double()
        if not n:
            return self
        mean = float(wide.mean())
        squares = float((wide - mean).square().sum())
        total, apart = self.count + n, mean - self.mean
        return RunningSpread(
            total, self.mean + apart * n / total, self.squares + squares + apart * apart * self.count * n / total
        )

    @property
    def std(self) -> float:
        """Standard deviation, the squares divided by their number; 1 where the scores so far are all equal."""
        std = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return std if std > LEAST else 1.0
