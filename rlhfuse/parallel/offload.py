"""Host copies of a model's weights, and their way back to the device while something else computes.

Offloaded weights own one stretch of host memory (page-locked on CUDA) and, while loaded, device memory. On a CPU both
are ordinary memory, moved by the same calls.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rlhfuse.parallel.device import Device

PAGE = 4096  # bytes; two stretches that are page-locked share no page
ALIGNMENT = 256  # bytes at which a tensor begins, as in CUDA's own allocations

Kind = tuple[torch.Size, torch.dtype]


class HostBlock:
    """One stretch of host memory for named tensors, page-locked on CUDA so that copies run behind other work."""

    def __init__(self, kinds: Mapping[str, Kind], device: Device) -> None:
        starts, end = {}, 0
        for name, (shape, dtype) in kinds.items():
            starts[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self._memory = page_locked(end) if device.is_cuda and end else torch.empty(end, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in kinds.items():
            size = math.prod(shape) * dtype.itemsize
            self.tensors[name] = self._memory[starts[name] : starts[name] + size].view(dtype).view(shape)


def page_locked(size: int) -> Tensor:
    """`size` bytes of host memory that a GPU reads and writes by itself, as long as the tensor lives.

    torch's own page-locked memory is rounded up to a power of two, each tensor or one for all: up to twice what is
    needed. Ordinary memory that is registered with the driver has its own size, to whole pages.
    """
    whole = torch.empty((-(-size // PAGE) + 1) * PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    memory, runtime = whole[first : first + size], cast(Any, torch.cuda.cudart())
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), -(-size // PAGE) * PAGE, 0)))
    # at the end of the process there is nothing to undo, and the driver may be gone
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


class WeightMemory:
    """The device memory of one module's weights, which is given back and taken again; values do not survive that.

    A module that was built in host memory has none on the device until `allocate`, once it was released.
    """

    def __init__(self, module: torch.nn.Module, device: Device) -> None:
        self.module, self._device = module, device
        self._kinds: dict[str, Kind] = {name: (w.shape, w.dtype) for name, w in module.named_parameters()}
        self.loaded = True

    def allocate(self) -> None:
        """Take device memory for weights of unset values, unless there is some."""
        if not self.loaded:
            for name, weight in self.module.named_parameters():
                shape, dtype = self._kinds[name]
                weight.data = torch.empty(shape, dtype=dtype, device=self._device.torch_device)
        self.loaded = True

    def release(self) -> None:
        """Give the memory back."""
        for weight in self.module.parameters():
            weight.data = torch.empty(0, dtype=weight.dtype, device=self._device.torch_device)
        self.loaded = False


class OffloadedWeights(WeightMemory):
    """The weights of one module in host memory; the module is usable between load and release."""

    def __init__(self, module: torch.nn.Module, device: Device) -> None:
        super().__init__(module, device)
        self._host: HostBlock | None = None

    @property
    def host_bytes(self) -> int:
        return self._host.nbytes if self._host else 0

    @property
    def _copies(self) -> Mapping[str, Tensor]:
        if self._host is None:
            self._host = HostBlock(self._kinds, self._device)
        return self._host.tensors

    def expose(self) -> None:
        """Make the copies in host memory the module's weights, for who fills them there; `release` ends that."""
        for name, weight in self.module.named_parameters():
            weight.data = self._copies[name]

    @torch.no_grad()
    def offload(self) -> None:
        """Copy the module's weights to the host and release the device memory."""
        for name, weight in self.module.named_parameters():
            self._copies[name].copy_(weight.data, non_blocking=True)
        self._finish_copies()
        self.release()

    def load(self) -> None:
        """Bring the weights to the device, in the current stream, and wait until they are there."""
        if not self.loaded:
            self.allocate()
            self.copy_in()

    @torch.no_grad()
    def copy_in(self) -> None:
        """Fill the memory that was allocated, in the current stream, and wait until the weights are there."""
        for name, weight in self.module.named_parameters():
            weight.data.copy_(self._copies[name], non_blocking=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        """The host waits for the current stream alone: other streams go on."""
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.torch_device).synchronize()
