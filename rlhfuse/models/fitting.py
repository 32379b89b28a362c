"""One optimizer loop for small models on one process: AdamW, linear warm-up, cosine decay, clipped gradients.

Used to train the embedded tiny models and by tools/train_reward.py. PPO training does not pass through
here. Knows nothing of what a batch is: the caller's function turns one into a loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

Report = Callable[[str], None]


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast: `steps` optimizer steps, `lr` the peak learning rate."""

    steps: int
    lr: float
    warmup_steps: int = 20
    weight_decay: float = 0.05
    clip_grad: float = 1.0
    report_every: int = 50

    def learning_rate(self, step: int) -> float:
        """Rate of step 0, 1, ...: rises linearly, then falls to 5% of the peak along a half cosine."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def fit(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], torch.Tensor],
    settings: FitSettings,
    report: Report,
) -> float:
    """Train `model` in place on the first `settings.steps` batches; the mean loss of the last tenth."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # norms: decay would pull them off their scale
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
    losses: list[float] = []
    started = time.perf_counter()
    model.train()
    for step, batch in zip(range(settings.steps), batches):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % settings.report_every == 0 or step + 1 == settings.steps:
            recent = losses[-settings.report_every :]
            elapsed = time.perf_counter() - started
            report(f"  step {step + 1}/{settings.steps}  loss {sum(recent) / len(recent):.4f}  {elapsed:.0f} s")
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)
