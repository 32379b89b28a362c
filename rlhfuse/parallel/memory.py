"""The most memory that this rank used in each phase of an iteration, measured.

On CUDA the allocator's own peak. On a CPU the peak of resident memory (VmHWM), which Linux lets a process reset through
/proc/self/clear_refs. The *base* is what a process holds beside models: interpreter, libraries, transport buffers.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

from rlhfuse.parallel.device import Device

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc(5)


def status_bytes(line: str) -> int:
    """Host memory of this process: VmRSS is what it holds now, VmHWM the peak."""
    said = next(text for text in STATUS.read_text().splitlines() if text.startswith(f"{line}:"))
    return int(said.split()[1]) * 1024


def process_line(device: Device, planned_bytes: int) -> str:
    """What of a rank's GPU is neither free nor torch's, for the log, beside the plan's; '' where it has none alone."""
    if device.backend != "nccl":
        return ""
    free, total = torch.cuda.mem_get_info(device.torch_device)
    held = total - free - torch.cuda.memory_reserved(device.torch_device)
    held, planned = f"{held / 2**30:.3g} GiB", f"{planned_bytes / 2**30:.3g} GiB"
    return f"contexts and communicators hold {held} of the GPU; the plan has {planned}"


class PhaseMeter:
    """Peaks by phase. `exact` is False where peaks cannot be reset: a phase then shows the largest up to its end."""

    def __init__(self, device: Device, return_memory: bool = True) -> None:
        """`return_memory`: on CPU give freed memory back at every switch, which peaks by phase need to be exact."""
        self._device, self._return_memory = device, return_memory
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self.exact = self._reset() and (return_memory or device.is_cuda)
        self.base_bytes = 0

    def switch(self, phase: str | None) -> None:
        """Leave the phase that runs, if any, and begin another, or none. A phase may come more than once."""
        if self._phase is not None:
            peak = self._read("VmHWM", torch.cuda.max_memory_allocated)
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))
        self._phase = phase
        self._reset()

    def note_base(self, held_bytes: int) -> None:
        """Take what is held now beyond the models' `held_bytes` as the base: it grows while libraries warm up."""
        self.base_bytes = self._read("VmRSS", torch.cuda.memory_allocated) - held_bytes

    def take(self) -> dict[str, int]:
        """Bytes at the peak of each phase since the last call, base included; ends the phase that runs."""
        self.switch(None)
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _read(self, line: str, cuda) -> int:
        return cuda(self._device.torch_device) if self._device.is_cuda else status_bytes(line)

    def _reset(self) -> bool:
        if self._device.is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)
            return True
        gc.collect(0)
        if self._return_memory and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:  # some containers forbid it
            return False
        return True
