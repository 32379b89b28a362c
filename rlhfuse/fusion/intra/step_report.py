"""What one run of a program took and saw on one rank: spans, the executor's own time, losses, faults.

Spans are in the device's time, all other seconds are of the clock of this rank's Python thread: on CUDA an instruction
returns when its work is queued, so waits are near zero there and a stage's time is that of launching it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlhfuse.base.clock import Clock, Span
from rlhfuse.parallel.optimizer import StepResult
from rlhfuse.schedule.ir.action import Action


@dataclass(frozen=True)
class StepReport:
    """One run of a program on this rank."""

    spans: tuple[Span, ...]  # of the instructions that compute (F, B, W, TE, RG, ST), waits left out
    losses: Mapping[Action, float]  # of each micro-batch, by the F of a last stage
    steps: Mapping[str, StepResult]  # by pipeline; a model that was not to step after a fault is missing
    faults: tuple[Action, ...]  # gave out NaN or infinity on this rank
    peak_live: int  # most micro-batches kept at once for their backward, over all stages of this rank
    seconds: float  # from the first posted receive to the last send received
    instructions: int
    overhead_seconds: float  # the executor's own Python, and the cutting of micro-batches

    @property
    def finite(self) -> bool:
        """Whether every model stepped."""
        return all(result.finite for result in self.steps.values())


class Stopwatch:
    """Times of moments in a device's work: `mark` them, `stop` when all is queued, then ask for their `seconds`."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._start = self.mark()
        self._start_seconds = clock.now()

    def mark(self) -> Any:
        """A moment after everything that was asked of the current stream so far."""
        if self._device.type != "cuda":
            return self._clock.now()
        event = torch.cuda.Event(enable_timing=True)  # the host's clock says when work was queued, not when it ran
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        """Wait until the device has come past every mark."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        """When a mark was passed, in seconds of the clock; only after `stop`."""
        if self._device.type != "cuda":
            return mark
        return self._start_seconds + self._start.elapsed_time(mark) / 1000
