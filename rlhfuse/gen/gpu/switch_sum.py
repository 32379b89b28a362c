"""Sums over the tensor ranks of an instance by the NVLink switch, over memory that all of them see.

A decode step sums few rows, for which NCCL's kernels take 10 us or more. On Hopper GPUs of one node the switch adds
(multicast addresses, torch's symmetric memory): each rank asks it for its part of the sum and hands that to all, so
that all hold the same bits.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.gen.core.model_shard import TensorParallel
from rlhfuse.parallel.collectives import all_gather_objects

LEAST_CAPABILITY = (9, 0)  # of a GPU that adds in the switch
TOLERANCE = 0.02  # of the largest sum, in bfloat16


class SwitchMemory:
    """Memory that the GPUs of a group see, torch's symmetric one, and the sum over it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """New on every rank of the group, [elements]; a collective. Raises where there is none."""
        from torch.distributed import _symmetric_memory as symmetric  # CPU builds of torch may lack it

        made = symmetric.empty(elements, dtype=dtype, device=self._device)
        if not symmetric.rendezvous(made, self._group.group_name).multicast_ptr:
            raise RuntimeError("these GPUs have no multicast addresses")
        return made

    def sum(self, part: Tensor) -> None:
        """Write the ranks' sum over `part`, the beginning of the buffer, on all ranks; never waits on the host."""
        torch.ops.symm_mem.multimem_all_reduce_(part, "sum", self._group.group_name)


class SwitchParallel(TensorParallel):
    """Products of up to `most_rows` rows are written into the shared memory, and summed there."""

    def __init__(self, group: dist.ProcessGroup, memory: SwitchMemory, buffer: Tensor) -> None:
        """`buffer`: of `memory`, as long as the largest product."""
        super().__init__(group)
        self._memory, self._buffer = memory, buffer

    def product_sum(self, x: Tensor, weight: Tensor) -> Tensor:
        """A view of the shared memory, which the next call overwrites."""
        rows, hidden = len(x), len(weight)
        if rows * hidden > self._buffer.numel():
            return super().product_sum(x, weight)
        part = self._buffer[: rows * hidden]
        whole = part.view(rows, hidden)
        torch.mm(x, weight.t(), out=whole)
        self._memory.sum(part)
        return whole

    def fault(self, elements: int) -> str:
        """What is wrong with a sum of random numbers, beside the group's own; a collective of the group."""
        part = self._buffer[:elements]
        part.copy_(torch.rand(elements, generator=torch.Generator().manual_seed(self.rank)))
        expected = part.to(torch.float32, copy=True)
        dist.all_reduce(expected, group=self.group)
        self._memory.sum(part)
        worst = float((part.float() - expected).abs().max() / expected.max())
        return "" if worst <= TOLERANCE else f"its sums are off by {worst:.2g}"


def choose_parallel(
    group: dist.ProcessGroup | None,
    wanted: str,
    device: torch.device,
    most_rows: int,
    hidden: int,
    dtype: torch.dtype,
    memory: SwitchMemory | None = None,
) -> tuple[TensorParallel, str]:
    """How the ranks of an instance sum, the same on all of them, and a line for the log; a collective of the group.

    `wanted`: auto, nccl or switch; `memory`: not CUDA's. Raises InputError where the switch is wanted and cannot.
    """
    plain = TensorParallel(group)
    if plain.size == 1 or group is None:
        return plain, ""
    name = "NCCL" if device.type == "cuda" else "gloo"
    if wanted == "nccl":
        return plain, f"sums of tensor ranks: {name}"
    made: SwitchParallel | None = None
    obstacle = _obstacle(group, device, hidden * dtype.itemsize) if memory is None else ""
    if not obstacle and len(set(all_gather_objects(socket.gethostname(), group))) > 1:
        obstacle = "the ranks are of several nodes"
    if not obstacle:
        buffer, memory = None, memory or SwitchMemory(group, device)
        try:
            buffer = memory.buffer(most_rows * hidden, dtype)
        except Exception as error:
            obstacle = str(error).splitlines()[0] if str(error) else type(error).__name__
        obstacle = _first(group, obstacle)  # a rank that has memory waits for nobody who has none
        if buffer is not None and not obstacle:
            made = SwitchParallel(group, memory, buffer)
            obstacle = _first(group, made.fault(min(3, most_rows) * hidden))
    if obstacle and wanted == "switch":
        raise InputError(f"rollout.all_reduce=switch: {obstacle}; use auto or nccl")
    if made is None or obstacle:
        return plain, f"sums of tensor ranks: {name} (not by the switch: {obstacle})"
    return made, "sums of tensor ranks: by the NVLink switch"


def _obstacle(group: dist.ProcessGroup, device: torch.device, row_bytes: int) -> str:
    """What forbids it, the same on all ranks: they are of one kind of GPU."""
    if device.type != "cuda" or "cuda:nccl" not in str(dist.get_backend_config(group)):
        return "it needs a GPU for each rank"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"it needs GPUs of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return f"a row of {row_bytes} bytes is no multiple of 16" if row_bytes % 16 else ""


def _first(group: dist.ProcessGroup, obstacle: str) -> str:
    """Obstacle of the first rank that has one; "" where none has."""
    return next(filter(None, all_gather_objects(obstacle, group)), "")
