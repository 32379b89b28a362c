"""Moments in a device's work, in the seconds of `time.perf_counter`.

On a CPU a moment is now. On CUDA now is when work was queued, not when it ran, so a moment is an event in the
current stream, and its time is known once the device has come past it. Knows nothing of what is timed.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """`mark` moments, `stop` when all is queued, then ask for their `seconds`."""

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
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        """Wait until the device has come past every mark."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        """When a mark was passed; only after `stop`."""
        if self._device.type != "cuda":
            return mark
        return self._start_seconds + self._start.elapsed_time(mark) / 1000
