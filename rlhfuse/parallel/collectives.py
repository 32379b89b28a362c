"""Values from rank to rank: the small agreements of a run, CPU tensors and so always over gloo; single transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhfuse.base.errors import InputError, JointError
from rlhfuse.parallel.device import Device

T = TypeVar("T")
Answer = TypeVar("Answer")


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank of `group` (default: all), pickled, in rank order. A collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def any_rank(yes: bool) -> bool:
    """Whether it is so on any rank. A collective."""
    answer = torch.tensor([yes], dtype=torch.int32)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)


def from_rank_0(value: T | None) -> T:
    """Rank 0's value on all ranks, pickled; what others pass in is not looked at. A collective."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def ask_rank_0(value: T, answer: Callable[[list[T]], Answer]) -> Answer:
    """Rank 0's `answer` to the value of each rank, in rank order, on all ranks, pickled. A collective.

    Raises JointError on all ranks where `answer` raises an InputError.
    """
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    found: Any = None
    problem = ""
    try:
        found = answer(values) if values else None
    except InputError as error:
        problem = str(error)
    found, problem = from_rank_0((found, problem))
    if problem:
        raise JointError(problem)
    return found


def send_bytes(payload: bytes, to: int) -> None:
    """Send to a global rank; returns once the memory may be reused."""
    dist.send(torch.tensor([len(payload)]), to)
    if payload:
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to)


def receive_bytes(source: int) -> bytes:
    """What the global rank `source` sends with `send_bytes`; waits for it."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if data.numel():
        dist.recv(data, source)
    return data.numpy().tobytes()


def start_transfer(kind: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.Work:
    """Start dist.isend or dist.irecv between ranks on the communicator that all have.

    Unbatched, NCCL would make one for each pair of ranks at their first transfer. All transfers of a rank are in one
    queue so: whoever has several under way starts them in an order that is the same for all ranks.
    """
    (work,) = dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer)])
    return work


def transfer_seconds(size: int, last: int, trips: int, device: Device) -> list[float]:
    """Seconds one way of `trips` round trips of `size` bytes between rank 0 and rank `last`, which both call this.

    With `last` 0: of copies within the rank's memory.
    """
    buffer, seconds, rank = torch.zeros(size, dtype=torch.uint8, device=device.torch_device), [], dist.get_rank()
    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    for _ in range(trips):
        device.synchronize()
        start = time.perf_counter()
        if last == 0:
            buffer.clone()
        else:
            first(buffer, last - rank)
            second(buffer, last - rank)
        device.synchronize()
        seconds.append((time.perf_counter() - start) / (2 if last else 1))
    return seconds


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """A collective: where any rank raises an InputError in the block, all leave it by a JointError of these words.

    So what one rank alone does, such as writing the run's files, ends the job on all of them and at once.
    """
    problem = ""
    try:
        yield
    except InputError as error:
        problem = str(error)
    if problems := [text for text in all_gather_objects(problem) if text]:
        raise JointError(problems[0])
