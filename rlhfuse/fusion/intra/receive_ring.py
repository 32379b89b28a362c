"""The buffers of one channel's receives: they live as long as the run, and each is used again and again.

A buffer is received into only when its last use was asked for before, in program order. On CUDA the receive waits for
that use on the device, in a stream where nothing else is: behind the queue of what this rank computes it would start
too late. Nothing is allocated or given back while a program runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class ReceiveRing:
    """`slots` buffers of bytes."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Any] = [torch.cuda.Event() for _ in range(slots)] if self._stream else []

    @property
    def slots(self) -> int:
        return len(self._buffers)

    def fit(self, nbytes: int) -> None:
        """Let every buffer hold `nbytes`; only between programs."""
        for slot, buffer in enumerate(self._buffers):
            if buffer.nbytes < nbytes:
                self._buffers[slot] = buffer = buffer.new_empty(0)  # before the new one comes
                self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                self.free(slot)  # its memory may have been another tensor's, which is still in use on the device

    def tensor(self, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer as a tensor that autograd takes for a new one."""
        count = math.prod(shape) * dtype.itemsize
        return self._buffers[slot][:count].view(dtype).view(shape).data

    @contextlib.contextmanager
    def posting(self, slot: int) -> Iterator[None]:
        """To be open while a receive into the buffer is posted."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._free[slot])
        with torch.cuda.stream(self._stream):
            yield

    def free(self, slot: int) -> None:
        """All that uses the buffer has been asked for, on the current stream."""
        if self._stream is not None:
            self._free[slot].record(torch.cuda.current_stream(self._device))
