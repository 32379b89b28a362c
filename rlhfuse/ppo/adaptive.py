"""What the algorithm adapts in the course of a run: the weight of the KL, and the scale of scores.

The KL's weight is fixed or steered towards a target (Ziegler et al. 2019, section 2.2). Scores may be divided by the
standard deviation of all scores so far (Engstrom et al. 2020, "Implementation matters", section 3). Plain numbers, so
that a checkpoint holds every bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

ERROR_LIMIT = 0.2  # one iteration's surprise moves the coefficient only so far
LEAST_FACTOR = 0.5  # nor does a batch of many times the horizon more than halve it
LEAST_COEF = 1e-6  # it is not steered below: from 0 it would never come back
LEAST_STD = 1e-6  # scores that are all (nearly) equal have no size to divide by


@dataclass(frozen=True)
class KLController:
    """The coefficient in force. `target` in nats per sample, 0 for a fixed coefficient; `horizon` in samples."""

    coef: float
    target: float = 0.0
    horizon: int = 10000

    def after(self, kl: float, samples: int) -> KLController:
        """For the next iteration, when `samples` samples had a mean KL of `kl` nats.

        e = clip(kl / target - 1, -0.2, 0.2),    coef <- coef * max(1 + e * samples / horizon, 0.5)
        """
        if not self.target or not samples:
            return self
        error = min(max(kl / self.target - 1, -ERROR_LIMIT), ERROR_LIMIT)
        steered = self.coef * max(1 + error * samples / self.horizon, LEAST_FACTOR)
        return replace(self, coef=max(steered, min(self.coef, LEAST_COEF)))


@dataclass(frozen=True)
class RunningMoments:
    """Mean of `count` scores, and the sum of their squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, scores: Tensor) -> RunningMoments:
        """With one batch more (Chan et al. 1979); `scores` [N], in an order that is the same on every rank."""
        n, wide = len(scores), scores.double()
        if not n:
            return self
        mean = float(wide.mean())
        squares = float((wide - mean).square().sum())
        total, apart = self.count + n, mean - self.mean
        return RunningMoments(
            total, self.mean + apart * n / total, self.squares + squares + apart * apart * self.count * n / total
        )

    @property
    def std(self) -> float:
        """Standard deviation, the squares divided by their number; 1 where the scores so far are all equal."""
        std = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return std if std > LEAST_STD else 1.0
