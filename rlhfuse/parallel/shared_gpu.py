"""A process group for ranks that share one GPU: gloo, with every CUDA tensor copied through page-locked host memory.

NCCL takes one rank per GPU, and gloo alone sends and receives no CUDA tensors. Results are gloo's on CPU tensors, bit
for bit. Seconds mean nothing: ranks take turns on the device, and whoever issues a transfer waits for the device first.
That stops nobody: it waits for its own launches alone, which wait for no peer.
"""

# torch passes other arguments to a group, by position, than its stubs tell
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils._pytree import tree_leaves, tree_map_only

SHARED_GPU = "shared_gpu"  # the name of the backend


def register(stages: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
    """Let `init_process_group(SHARED_GPU)` make such groups. `stages`: which tensors pass through host copies."""

    def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> SharedGpuGroup:
        return SharedGpuGroup(store, rank, size, timeout, stages)

    dist.Backend.register_backend(SHARED_GPU, make, devices=["cpu", "cuda"])


class StagedWork(dist.Work):
    """Transfers as one; `wait` brings what `arrived` in host memory, (tensor, its host copy), to the tensors."""

    def __init__(self, works: Sequence[dist.Work], arrived: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self._works, self._arrived = works, arrived

    def is_completed(self) -> bool:
        """Whether nothing is left to do; a work that receives is only completed by `wait`."""
        return not self._arrived and all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the transfers; then the current stream, which need not wait for the host, has the tensors."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        for tensor, host in self._arrived:  # its allocator keeps page-locked memory until it has been read
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(host, non_blocking=True)
        self._works, self._arrived = (), ()
        return True


class SharedGpuGroup(dist.ProcessGroup):
    """A gloo group that gets host copies of CUDA tensors, and CPU tensors as they are."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))  # what torch asks, such as to set a timeout

    def __init__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta, stages: Callable[[Tensor], bool]
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # what a group written in Python calls
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout)
        self._stages = stages

    # what torch asks of a group

    def getBackendName(self) -> str:
        return SHARED_GPU

    def _set_group_name(self, name: str) -> None:  # torch's own keeps it in backends that this group has not
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> ProcessGroupGloo:
        return self._gloo

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    # transfers

    def _transfer(self, name: str, written: Any, *arguments: Any) -> dist.Work:
        """gloo's operation of this name. It writes `written`, tensors in whatever lists, unless it sends them."""
        tensors = tree_leaves(written)
        if not self._stages(tensors[0]):
            return getattr(self._gloo, name)(written, *arguments)
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("what ranks on one GPU exchange passes through the host and cannot be captured")
        hosts, *others = tree_map_only(Tensor, _to_host, (written, *arguments))
        work = getattr(self._gloo, name)(hosts, *others)
        return StagedWork([work], () if name == "send" else list(zip(tensors, tree_leaves(hosts))))

    send = partialmethod(_transfer, "send")
    recv = partialmethod(_transfer, "recv")
    broadcast = partialmethod(_transfer, "broadcast")
    allreduce = partialmethod(_transfer, "allreduce")
    allreduce_coalesced = partialmethod(_transfer, "allreduce_coalesced")
    allgather = partialmethod(_transfer, "allgather")
    all_gather_single = partialmethod(_transfer, "_allgather_base")
    reduce_scatter_single = partialmethod(_transfer, "_reduce_scatter_base")

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        return StagedWork([self.all_gather_single(*pair, *options) for pair in zip(outputs, inputs)])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        return StagedWork([self.reduce_scatter_single(*pair, *options) for pair in zip(outputs, inputs)])

    _allgather_base = all_gather_single  # the names until torch 2.12
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> dist.Work:
        """Gather pickled objects, which are in host memory."""
        return self._gloo.gather(outputs, inputs, *options)

    def barrier(self, *options: Any, **named: Any) -> dist.Work:
        return self._gloo.barrier(*options, **named)


def _to_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory that another thread may write to, once the current stream has made it."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
