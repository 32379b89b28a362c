"""The learning rate of an iteration: a function of the settings alone, so that a resumed run goes on with the same."""

from __future__ import annotations

import math

from rlhfuse.config.settings import OptimizerConfig


def learning_rate(optim: OptimizerConfig, iteration: int) -> float:
    """Rate of iteration 0, 1, ... since the model began to learn: up to `optim.lr`, then the scheduler's way down.

    The last of w iterations of warm-up has the whole rate; the way down begins after it and ends at iteration
    `lr_decay_iterations`, from where on the floor holds.
    """
    end = optim.lr_decay_iterations
    warmup = optim.warmup_iterations or round(optim.lr_warmup_ratio * end)
    rate = optim.lr * min(1.0, (iteration + 1) / max(warmup, 1))
    if optim.lr_scheduler_type == "constant" or iteration < warmup:
        return rate
    passed = min((iteration - warmup) / max(end - warmup, 1), 1.0)
    left = 1 - passed if optim.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)
