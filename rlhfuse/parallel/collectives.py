"""Bytes between ranks: the small agreements of a run. CPU tensors, so always over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlhfuse.errors import InputError, JointError


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """What each rank of `group` (default: all) passed in, in rank order. A collective."""
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(rows, mine, group=group)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes)]


def send_bytes(payload: bytes, to: int, group: dist.ProcessGroup | None = None) -> None:
    """Send to a global rank; returns once the memory may be reused."""
    dist.send(torch.tensor([len(payload)]), to, group=group)
    if payload:
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to, group=group)


def receive_bytes(source: int, group: dist.ProcessGroup | None = None) -> bytes:
    """What the global rank `source` sends with `send_bytes`; waits for it."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    if data.numel():
        dist.recv(data, source, group=group)
    return data.numpy().tobytes()


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
    if said := [one.decode() for one in all_gather_bytes(problem.encode()) if one]:
        raise JointError(said[0])
