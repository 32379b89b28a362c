"""Whose attention kernels serve here: two tables, the best backend first; and the choice by name.

A backend with an obstacle is passed over, and the log says why. On the CPU in float32 there is one for each use, on
which exactness rests (packed/cpu.py, paged/cpu.py), and nothing to choose.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist

from rlhfuse.base.errors import InputError
from rlhfuse.models.attention.packed import flash_attention
from rlhfuse.models.attention.packed.dense import dense_attention
from rlhfuse.models.attention.packed.sequences import PackedShape, VarlenKernel
from rlhfuse.models.attention.paged import flashinfer, triton
from rlhfuse.models.attention.paged.cache import CacheShape, PagedAttention
from rlhfuse.models.attention.paged.gathered import GatheredAttention

Shape = TypeVar("Shape")
Kernels = TypeVar("Kernels")


@dataclass(frozen=True)
class Backend(Generic[Shape, Kernels]):
    """A row: `obstacle` says why it cannot serve such a shape, '' if it can; `make` makes its kernels ready."""

    name: str
    obstacle: Callable[[Shape], str]
    make: Callable[[Shape], Kernels]


PACKED: tuple[Backend[PackedShape, VarlenKernel], ...] = (  # of training and scoring, without torch's flash-attention
    Backend("flash-attn", flash_attention.obstacle, flash_attention.make),
    Backend(
        "torch's dense attention, length by length, which is slow", lambda shape: "", lambda shape: dense_attention
    ),
)
PAGED: tuple[Backend[CacheShape, PagedAttention], ...] = (  # of generation, named by rollout.attention
    Backend("flashinfer", flashinfer.obstacle, flashinfer.FlashInferAttention),
    Backend("triton", triton.obstacle, triton.TritonAttention),
    Backend("torch", lambda _: "", lambda _: GatheredAttention()),
)


@dataclass(frozen=True, eq=False)
class Chosen(Generic[Kernels]):
    """Kernels of one row of a table."""

    name: str
    kernels: Kernels
    passed_over: dict[str, str]  # why not those before it, by name

    def line(self, use: str) -> str:
        """For the log."""
        return "; ".join((f"{use}: {self.name}", *self.passed_over.values()))


def choose(rows: Iterable[Backend[Shape, Kernels]], shape: Shape) -> Chosen[Kernels]:
    """The first that can serve. Raises InputError with the last one's obstacle where none can.

    Libraries that compile do so here, for minutes the first time.
    """
    reasons: dict[str, str] = {}
    for row in rows:
        reasons[row.name] = row.obstacle(shape)
        if reasons[row.name]:
            continue
        try:
            made = row.make(shape)
        except (ImportError, OSError, RuntimeError) as error:  # a library's kernels that don't compile
            told = next(iter(str(error).splitlines()), type(error).__name__)
            reasons[row.name] = f"{row.name} cannot be made ready: {told}"
            continue
        del reasons[row.name]
        return Chosen(row.name, made, reasons)
    raise InputError(list(reasons.values())[-1])


@functools.cache
def choose_packed(shape: PackedShape) -> VarlenKernel:
    """The kernel of packed attention where torch's flash-attention cannot serve, told once on CUDA."""
    chosen = choose(PACKED, shape)
    if shape.device.type == "cuda":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in chosen.passed_over.items())
        line = f"packed attention of training and scoring: {chosen.name}{f' ({reasons})' if reasons else ''}"
        if chosen.name == PACKED[-1].name:
            warnings.warn(line, stacklevel=2)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            print(line, flush=True)
    return chosen.kernels


def choose_paged(shape: CacheShape, wanted: str = "auto") -> Chosen[PagedAttention]:
    """Kernels over the cache, by their name or the first that can serve; elsewhere than on CUDA auto is torch.

    Raises InputError where those `wanted` cannot.
    """
    if wanted == "auto" and shape.device.type == "cuda":
        return choose(PAGED, shape)
    name = "torch" if wanted == "auto" else wanted
    try:
        return choose([row for row in PAGED if row.name == name], shape)
    except InputError as error:
        raise InputError(f"rollout.attention={wanted} cannot serve: {error}; use auto") from None
