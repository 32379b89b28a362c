"""Host copies of a model's weights, and their way back to the device while something else computes.

Offloaded weights own two allocations: the host copy (pinned on CUDA) and, while loaded, the device copy. On a CPU both
are ordinary memory, moved by the same calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.parallel.device import Device


class WeightMemory:
    """The device memory of one module's weights, which is given back and taken again; values do not survive that."""

    def __init__(self, module: torch.nn.Module, device: Device) -> None:
        self.module, self._device = module, device
        self._kinds = {name: (weight.shape, weight.dtype) for name, weight in module.named_parameters()}
        self.loaded = True

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

    @torch.no_grad()
    def load(self) -> None:
        """Bring the weights to the device, in the current stream, and wait until they are there."""
        if self.loaded:
            return
        device = self._device.torch_device
        for name, parameter in self.module.named_parameters():
            copy = torch.empty_like(self._host[name], device=device, pin_memory=False)
            parameter.data = copy.copy_(self._host[name], non_blocking=True)
            if self._device.is_cuda:  # they are read by another stream than the one that they are allocated in
                copy.record_stream(torch.cuda.default_stream(device))
        if self._device.is_cuda:
            torch.cuda.current_stream(device).synchronize()  # not the device's: other streams go on
        self.loaded = True
