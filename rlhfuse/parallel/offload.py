"""Host copies of a model's weights, and their way back to the device while something else computes.

A offloaded model owns two allocations: the host copy (pinned on CUDA) and, while loaded, the device copy. On a
CPU both are ordinary memory, moved by the same calls. `begin_load` starts the copy on a background thread
(on CUDA: a copy stream), `finish_load` waits for it; `release` gives the device memory back.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from rlhfuse.parallel.device import Device


class WeightMemory:
    """The device memory of one module's weights, which is given back and taken again; values do not survive that."""

    def __init__(self, module: torch.nn.Module, device: Device) -> None:
        self.module = module
        self._device = device
        self._kinds = {name: (weight.shape, weight.dtype) for name, weight in module.named_parameters()}
        self.loaded = True

    @property
    def device_bytes(self) -> int:
        """What the weights take on the device now."""
        return sum(weight.nbytes for weight in self.module.parameters())

    def allocate(self) -> None:
        """Take device memory for weights of unset values, unless there is some."""
        if not self.loaded:
            for name, weight in self.module.named_parameters():
                shape, dtype = self._kinds[name]
                weight.data = torch.empty(shape, dtype=dtype, device=self._device.torch_device)
        self.loaded = True

    def release(self) -> None:
        """Give the device memory back."""
        for weight in self.module.parameters():
            weight.data = torch.empty(0, dtype=weight.dtype, device=self._device.torch_device)
        self.loaded = False


class OffloadedWeights(WeightMemory):
    """The weights of one module in host memory; the module is usable between load and release."""

    def __init__(self, module: torch.nn.Module, device: Device) -> None:
        super().__init__(module, device)
        self._host: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device.torch_device) if device.is_cuda else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def host_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._host.values())

    @torch.no_grad()
    def offload(self) -> None:
        """Copy the module's weights to the host and release the device memory."""
        for name, parameter in self.module.named_parameters():
            if name not in self._host:
                self._host[name] = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=self._device.is_cuda)
            self._host[name].copy_(parameter.data)
        self._device.synchronize()
        self.release()

    def allocate(self) -> None:
        """Take device memory for weights of unset values, to be written by the caller and then offloaded."""
        if self._thread is not None:
            self.finish_load()
        super().allocate()

    def begin_load(self) -> None:
        """Start bringing the weights to the device; returns at once."""
        if self.loaded or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._copy_in, name="load-weights")
        self._thread.start()

    def finish_load(self) -> None:
        """Wait until the module can be used. Raises what the copy raised."""
        self.begin_load()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._stream is not None:
            torch.cuda.current_stream(self._device.torch_device).wait_stream(self._stream)
        self.loaded = True

    def _copy_in(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device.torch_device)  # a new thread begins on GPU 0
            with torch.no_grad(), torch.cuda.stream(self._stream):
                for name, parameter in self.module.named_parameters():
                    copy = torch.empty_like(self._host[name], device=self._device.torch_device, pin_memory=False)
                    parameter.data = copy.copy_(self._host[name], non_blocking=True)
                    if self._stream is not None:
                        copy.record_stream(torch.cuda.default_stream(self._device.torch_device))
        except BaseException as failure:  # handed to the thread that waits
            self._failure = failure
