"""Host copies of a model's weights and of optimizer states, and their way there and back beside other work.

What is offloaded owns one stretch of host memory (page-locked on CUDA) and, while loaded, device memory. On a CPU both
are ordinary memory, moved by the same calls.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from rlhfuse.parallel.background import Background
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
    """The weights of one module in host memory; the module is usable between load and release.

    `arrival`: work under way that fills the copies in host memory; None where nothing does.
    """

    arrival: Background | None = None

    def await_values(self) -> None:
        """Until the copies in host memory are there. Raises what bringing them raised."""
        if self.arrival is not None:
            self.arrival.wait()

    @cached_property
    def _host(self) -> HostBlock:
        return HostBlock(self._kinds, self._device)

    @property
    def host_bytes(self) -> int:
        """0 before anything was copied."""
        return self._host.nbytes if "_host" in vars(self) else 0

    def expose(self) -> None:
        """Make the copies in host memory the module's weights, for who fills them there; `release` ends that."""
        for name, weight in self.module.named_parameters():
            weight.data = self._host.tensors[name]

    @torch.no_grad()
    def offload(self) -> None:
        """Copy the module's weights to the host and release the device memory."""
        for name, weight in self.module.named_parameters():
            self._host.tensors[name].copy_(weight.data, non_blocking=True)
        self._finish_copies()
        self.release()

    def load(self) -> None:
        """Bring the weights to the device, in the current stream, and wait until they are there."""
        if not self.loaded:
            self.await_values()
            self.allocate()
            self.copy_in()

    @torch.no_grad()
    def copy_in(self) -> None:
        """Fill the memory that was allocated, in the current stream, and wait until the weights are there."""
        for name, weight in self.module.named_parameters():
            weight.data.copy_(self._host.tensors[name], non_blocking=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        """The host waits for the current stream alone: other streams go on."""
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.torch_device).synchronize()


class RestingTensors:
    """Tensors that rest in host memory while nothing is computed with them, in this order, again and again:

    leave      begin to copy them to the host, behind what was launched so far, beside what is launched from now on
    free       give their device memory back, once the copies are there; their values lie in host memory then
    come_back  take device memory, and begin to fill it
    wait       what is launched from now on finds them

    Each may be called where it has nothing to do, and `come_back` right after `leave`.
    """

    def __init__(self, find: Callable[[], Mapping[str, Tensor]], device: Device) -> None:
        """`find`: the tensors there are, by name; later there may be more of them, or others by the same names."""
        self._find, self._device = find, device
        self._blocks: list[HostBlock] = []
        self._hosts: dict[str, Tensor] = {}
        self._resting: Mapping[str, Tensor] = {}
        self._freed = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: Any = None  # event on CUDA, after the last copies

    @property
    def host_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def leave(self) -> None:
        if self._resting:
            return
        self._resting = dict(self._find())
        new = {name: (tensor.shape, tensor.dtype) for name, tensor in self._resting.items() if name not in self._hosts}
        if new:
            self._blocks.append(HostBlock(new, self._device))
            self._hosts |= self._blocks[-1].tensors
        self._copy((self._hosts[name], tensor.data) for name, tensor in self._resting.items())

    def free(self) -> None:
        if self._freed or not self._resting:
            return
        if self._copied is not None:
            self._copied.synchronize()  # others may read the values in host memory
        for name, tensor in self._resting.items():
            tensor.data = self._hosts[name]
        self._freed = True

    def come_back(self) -> None:
        if self._freed:
            for tensor in self._resting.values():
                tensor.data = torch.empty_like(tensor.data, device=self._device.torch_device)
            self._copy((tensor.data, self._hosts[name]) for name, tensor in self._resting.items())
        self._resting, self._freed = {}, False

    def wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device.torch_device).wait_event(self._copied)

    @torch.no_grad()
    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """(target, source), on CUDA in a stream of their own, which follows the one that computes."""
        if not self._device.is_cuda:
            for target, source in pairs:
                target.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device.torch_device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device.torch_device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()
