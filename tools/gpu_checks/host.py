"""Host time of single calls, and memory bandwidth of the kernels of a layer: the first figures of a check."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks.bench import Bench
from gpu_checks.figures import Figure, timed, told

from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.build import layer_ops
from rlhfuse.models.stack.torch_ops import HeadShape

CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
CALLS = 100  # in a row, few enough for a queue of launches


def check_host(bench: Bench) -> dict:
    """Processor and clock; nanoseconds of a step of a Python loop; microseconds of single calls on 16 rows of 8B."""
    rows, size, heads = (16, 4096, HeadShape(32, 8, 128)) if bench.on_gpu else (16, 64, HeadShape(4, 2, 16))
    like: Any = dict(dtype=torch.bfloat16, device=bench.where)
    x, weight, total = torch.zeros(rows, size, **like), torch.zeros(size, size, **like), torch.zeros(size, size)
    norm, total = torch.ones(size, **like), total.to(bench.where)
    ops = layer_ops(_tables(rows, heads.dim, bench), heads, 1e-5, torch.bfloat16, bench.where)
    batch = ops.batch(SequenceBorders.of([rows], bench.where))
    q, k, v = (torch.zeros(rows, count, heads.dim, **like) for count in (heads.heads, heads.groups, heads.groups))
    holder: Any = SimpleNamespace(main_grad=total)
    with torch.no_grad():
        out, saved = ops.attend(q, k, v, batch)
        calls: dict[str, Callable[[], Any]] = {
            "torch.empty": lambda: torch.empty(rows, size, **like),
            "add": lambda: x + x,
            "mm": lambda: torch.mm(x, weight),
            "F.linear": lambda: F.linear(x, weight),
            "added product": lambda: ops.add_product(holder, x, x),
            "F.rms_norm": lambda: F.rms_norm(x, (size,), norm, 1e-5),
            "norm of a layer": lambda: ops.norm(x, x, None, norm),
            "attention": lambda: ops.attend(q, k, v, batch),
            "attention backward": lambda: ops.attend_backward(out, q, k, v, out, saved, batch),
        }
        taken = {name: round(_microseconds(bench, call), 2) for name, call in calls.items()}
    here = torch.zeros(4)
    return {
        "processor": _line("model name"),
        "megahertz": _line("cpu MHz"),
        "cores": len(os.sched_getaffinity(0)),
        "clock": CLOCK.read_text().strip() if CLOCK.exists() else "unknown",
        "loop_nanoseconds": round(_best(lambda: sum(1 for _ in range(10**6))) * 1e3, 1),
        "add_on_cpu_microseconds": round(_best(lambda: [torch.add(here, here) for _ in range(10**4)]) * 100, 3),
        "microseconds": taken,
    }


def check_kernels(bench: Bench, tokens: int) -> dict:
    """Kernels of a layer of 8B between the products, beside the memory's rate: each number read or written once."""
    tokens, size, mlp, heads = (
        (tokens, 4096, 14336, HeadShape(32, 8, 128)) if bench.on_gpu else (32, 64, 96, HeadShape(4, 2, 16))
    )
    like: Any = dict(dtype=torch.bfloat16, device=bench.where)
    ops = layer_ops(_tables(tokens, heads.dim, bench), heads, 1e-5, torch.bfloat16, bench.where)
    batch = ops.batch(SequenceBorders.of([tokens], bench.where))
    x, delta, gradient = (torch.randn(tokens, size, **like) for _ in range(3))
    qkv = torch.randn(tokens, (heads.heads + 2 * heads.groups) * heads.dim, **like)
    gate_up, by_y = torch.randn(tokens, 2 * mlp, **like), torch.randn(tokens, mlp, **like)
    norm: Any = torch.nn.Parameter(torch.ones(size, **like))
    norm.main_grad = torch.zeros(size, device=bench.where)
    with torch.no_grad():
        total, _, scales = ops.norm(x, delta, None, norm)
        q, k, v, saved = ops.split(qkv, None, batch)
        work: dict[str, tuple[int, Callable[[], Any]]] = {
            "norm": (4 * size, lambda: ops.norm(x, delta, None, norm)),
            "norm backward": (4 * size, lambda: ops.norm_backward(gradient, total, norm, scales, delta)),
            "split": (2 * qkv.shape[1], lambda: ops.split(qkv, None, batch)),
            "join": (2 * qkv.shape[1], lambda: ops.join((q, k, v), saved, None, batch)),
            "swiglu": (3 * mlp, lambda: ops.swiglu(gate_up)),
            "swiglu backward": (5 * mlp, lambda: ops.swiglu_backward(gate_up, by_y, by_y)),
            "swiglu backward and again": (6 * mlp, lambda: ops.swiglu_backward(gate_up, by_y, None)),
        }
        figures = []
        for name, (numbers, call) in work.items():
            seconds, moved = timed(bench, call), 2 * numbers * tokens
            figures.append(Figure(f"kernel {name}", seconds[0], ("read", moved), moved, 0.0, "memory", *seconds[1:]))
    return told(*figures)


def _tables(rows: int, dim: int, bench: Bench) -> Any:
    tables = torch.ones(rows, dim // 2, device=bench.where), torch.zeros(rows, dim // 2, device=bench.where)
    return SimpleNamespace(up_to=lambda length: tables)


def _microseconds(bench: Bench, call: Callable[[], Any]) -> float:
    """Until the host has launched one of some calls in a row."""
    return timed(bench, lambda: [call() for _ in range(CALLS)], count=CALLS).host_seconds * 1e6


def _best(work: Callable[[], Any]) -> float:
    """Milliseconds."""
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def _line(key: str) -> str:
    """The first value of /proc/cpuinfo's lines of that name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "unknown")
