"""Bytes and small values from one rank to another, for agreements between two. CPU tensors, so always over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist


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
