"""A copy of what one optimizer step changes, to take the step back bit for bit.

Kept are the main weights and the optimizer's state, step counters included; the model's own weights follow from
the main weights. The copies live in host memory (pinned on CUDA, filled and read by the current stream, in its
order) and are allocated once. Knows nothing of Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class UndoCopy:
    """Remembers `optimizers`' weights and state at `take`, writes them back at `restore`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._copies: dict[tuple[int, int, int, str], Tensor] = {}
        self._plain: dict[tuple[int, int, int, str], Any] = {}
        self._taken = False

    @property
    def bytes(self) -> int:
        """Host memory that the copies take."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything. The former copy is overwritten."""
        kept: dict[tuple[int, int, int, str], Tensor] = {}
        self._plain = {}
        for key, value in self._entries():
            if isinstance(value, Tensor):
                copy = self._copies.get(key)
                if copy is None:
                    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                kept[key] = copy.copy_(value, non_blocking=True)
            else:
                self._plain[key] = value
        self._copies = kept
        self._taken = True

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copy back; state that did not exist is removed. Raises RuntimeError without a `take` before."""
        if not self._taken:
            raise RuntimeError("there is no step to undo: none was told to remember")
        for key, value in list(self._entries()):
            number, group, place, name = key
            groups = self._optimizers[number].param_groups
            if key in self._copies:
                value.copy_(self._copies[key], non_blocking=True)
                continue
            owner = groups[group] if place < 0 else self._optimizers[number].state[groups[group]["params"][place]]
            if key in self._plain:
                owner[name] = self._plain[key]
            else:
                del owner[name]

    def _entries(self):
        """((optimizer, group, weight, name), value): weights are named "", a group's own counters have weight -1."""
        for number, optimizer in enumerate(self._optimizers):
            for g, group in enumerate(optimizer.param_groups):
                if "step" in group:  # fused Adams count per group
                    yield (number, g, -1, "step"), group["step"]
                for place, weight in enumerate(group["params"]):
                    yield (number, g, place, ""), weight
                    for name, value in optimizer.state.get(weight, {}).items():
                        yield (number, g, place, name), value
