"""The weight of the KL, fixed or steered towards a target (Ziegler et al. 2019, section 2.2).

    e = clip(kl / target - 1, -0.2, 0.2),    coef <- coef * (1 + e * samples / horizon)

Knows nothing of how the KL is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ERROR_LIMIT = 0.2  # one iteration's surprise moves the coefficient only so far


@dataclass(frozen=True)
class KLControl:
    """The coefficient in force. `target` in nats per sample, 0 for a fixed coefficient; `horizon` in samples."""

    coef: float
    target: float = 0.0
    horizon: int = 10000

    def after(self, kl: float, samples: int) -> KLControl:
        """The control for the next iteration, when `samples` samples had a KL of `kl` nats each in the mean."""
        if not self.target:
            return self
        error = min(max(kl / self.target - 1, -ERROR_LIMIT), ERROR_LIMIT)
        return replace(self, coef=self.coef * max(1 + error * samples / self.horizon, 0.0))
