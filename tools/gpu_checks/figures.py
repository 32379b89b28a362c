"""Figures: seconds of a piece of work, what it must move and compute, and how the planner would price it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from gpu_checks.bench import Bench

BEHIND = 60_000_000  # cycles of a pause, some 30 ms, in which the host launches what stands behind it


@dataclass(frozen=True)
class Figure:
    """`price`: a name of report.PRICES and its arguments. `bytes` travel `over` a link or memory."""

    name: str
    seconds: float
    price: tuple[Any, ...]
    bytes: float = 0.0
    flops: float = 0.0
    over: Literal["memory", "node_link", "host"] = "memory"
    host_seconds: float | None = None  # until the host had launched it
    device_seconds: float | None = None  # of the device alone, which waits for no launch


def told(*figures: Figure, **more: Any) -> dict[str, Any]:
    """What a check returns: figures, and whatever else it found."""
    return {"figures": [asdict(figure) for figure in figures], **more}


class Timed(NamedTuple):
    """Seconds until the device has finished, until the host has launched, and those of the device (None on a CPU)."""

    seconds: float
    host_seconds: float
    device_seconds: float | None


def timed(bench: Bench, work: Callable[[], Any], repeats: int = 5, count: int = 1) -> Timed:
    """Medians, after two runs that do not count; where `work` does its thing `count` times, of one."""
    rows = []
    for number in range(repeats + 2):
        bench.synchronize()
        start = time.perf_counter()
        work()
        launched = time.perf_counter()
        bench.synchronize()
        if number >= 2:
            rows.append((time.perf_counter() - start, launched - start))
    seconds, host = (statistics.median(column) / count for column in zip(*rows))
    return Timed(seconds, host, min(_device_seconds(work) for _ in range(3)) / count if bench.on_gpu else None)


def _device_seconds(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BEHIND)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def check_rates(bench: Bench) -> dict:
    """What memory and products of this machine can do: a large copy, a large square product in bfloat16."""
    moved = 2 << (30 if bench.on_gpu else 26)  # read and written
    source, target = (torch.ones(moved // 2, dtype=torch.uint8, device=bench.where) for _ in range(2))
    copy = timed(bench, lambda: target.copy_(source)).seconds
    size = 8192 if bench.on_gpu else 256
    a, b = (torch.randn(size, size, device=bench.where).bfloat16() for _ in range(2))
    product = timed(bench, lambda: a @ b).seconds
    flops = 2.0 * size**3
    return told(
        Figure("copy", copy, ("read", moved), bytes=moved),
        Figure("product", product, ("multiply", flops), flops=flops),
    )
