"""What one run of a program took and saw on one rank: spans, the executor's own time, losses, faults.

Spans are in the device's time, all other seconds are wall time of this rank's Python thread: on CUDA an instruction
returns when its work is queued, so waits are near zero there and a stage's time is that of launching it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlhfuse.parallel.optimizer import StepResult
from rlhfuse.schedule.ir.action import Action, Kind


@dataclass(frozen=True)
class ActionSpan:
    """When an instruction that computes (F, B, W, TE, RG, ST) ran, in `time.perf_counter` seconds, waits left out."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass
class KindTimes:
    """Where the time of all instructions of one kind went; added up while a program runs."""

    count: int = 0
    total_seconds: float = 0.0  # from the end of the instruction before to the end of each
    stage_seconds: float = 0.0  # in models, optimizers and collectives
    transport_seconds: float = 0.0  # in calls that start sends and receives
    waiting_seconds: float = 0.0  # for inputs and for gradient reductions

    @property
    def overhead_seconds(self) -> float:
        """The executor's own Python, and the cutting of micro-batches."""
        return self.total_seconds - self.stage_seconds - self.transport_seconds - self.waiting_seconds


@dataclass(frozen=True)
class StepReport:
    """One run of a program on this rank."""

    spans: tuple[ActionSpan, ...]
    times: Mapping[Kind, KindTimes]
    losses: Mapping[Action, float]  # of each micro-batch, by the F of a last stage
    steps: Mapping[str, StepResult]  # by pipeline; a model that was not to step after a fault is missing
    faults: tuple[Action, ...]  # gave out NaN or infinity on this rank
    peak_live: int  # most micro-batches kept at once for their backward, over all stages of this rank
    seconds: float  # from the first posted receive to the last send received

    @property
    def finite(self) -> bool:
        """Whether every model stepped."""
        return all(result.finite for result in self.steps.values())


class Stopwatch:
    """Times of moments in a device's work: `mark` them, `stop` when all is queued, then ask for their `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._start = self.mark()
        self._start_seconds = time.perf_counter()

    def mark(self) -> Any:
        """A moment after everything that was asked of the current stream so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the host's clock says when work was queued, not when it ran
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        """Wait until the device has come past every mark."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        """When a mark was passed, in `time.perf_counter` seconds; only after `stop`."""
        if self._device.type != "cuda":
            return mark
        return self._start_seconds + self._start.elapsed_time(mark) / 1000
