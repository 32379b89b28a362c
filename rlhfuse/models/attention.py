"""Attention of packed sequences, for training and scoring; that of generation is paged_attention.py.

Torch's own varlen kernel, then flash-attn's, then dense attention; this is the only file that imports flash_attn.
Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.cpu.packed_attention import packed_attention
from rlhfuse.models.rotary import rotate_packed


@functools.cache  # a failed import is searched for again each time
def import_flash_attention() -> tuple[Any | None, str | None]:
    """The flash_attn module, or None and why not."""
    try:
        import flash_attn  # pyright: ignore[reportMissingImports]  optional
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "flash_attn"
        return None, "flash-attn is not installed" if absent else f"flash-attn cannot be imported: {error}"
    return flash_attn, None


@dataclass(frozen=True)
class SequenceBorders:
    """Packed sequences of T tokens: sequence s is rows borders[s]:borders[s + 1]."""

    cu_seqlens: Tensor  # [S + 1] int32: the borders, on the device
    positions: Tensor  # [T] int64: of each token in its sequence
    borders: tuple[int, ...]  # on the host
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> SequenceBorders:
        borders = (0, *accumulate(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        there = torch.tensor(borders, dtype=torch.int32).to(device), positions.to(device)
        return SequenceBorders(*there, borders, max(lengths))


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor], sequences: SequenceBorders
) -> Tensor:
    """Causal attention within each packed sequence. q [T, H, D], k and v [T, G, D]; returns [T, H, D].

    rotary: cos and sin, each [longest sequence or more, D / 2] float32, which turn q and k by their positions.
    Differentiable in q, k, v. Nothing here waits for the device.
    """
    if not q.is_cuda and q.dtype == torch.float32:
        return packed_attention(q, k, v, rotary, sequences.cu_seqlens)
    q, k = (rotate_packed(x, rotary, sequences.positions) for x in (q, k))
    return varlen_kernel(q.device, q.dtype, q.shape[-1])(q, k, v, sequences)


VarlenKernel = Callable[[Tensor, Tensor, Tensor, SequenceBorders], Tensor]  # as `varlen_attention`, of what is turned


@functools.cache
def varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> VarlenKernel:
    """The first of torch's own varlen kernel, flash-attn's, and torch's dense attention that can; told once on CUDA."""
    obstacles = []
    for name, kernel, obstacle in (
        ("torch's varlen attention", torch_varlen, torch_varlen_obstacle(device)),
        ("flash-attn", flash_varlen, import_flash_attention()[1]),
    ):
        obstacle = width_obstacle(device, dtype, head_dim) or obstacle
        if obstacle is None:
            _tell(f"packed attention of training and scoring: {name}{_because(obstacles)}")
            return kernel
        obstacles.append(f"{name}: {obstacle}")
    if device.type == "cuda":
        text = "packed attention of training and scoring: torch's dense attention, length by length, which is slow"
        warnings.warn(f"{text}{_because(obstacles)}", stacklevel=2)
    return dense_varlen


def _because(obstacles: Sequence[str]) -> str:
    return f" ({'; '.join(obstacles)})" if obstacles else ""


def _tell(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def width_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no flash kernel computes such heads here."""
    if device.type != "cuda":
        return "it runs on CUDA alone"
    if dtype == torch.float32:
        return "it computes in 16 bits, not in float32"
    if head_dim % 8 or head_dim > 256:
        return f"it takes a head_dim of multiples of 8 up to 256, not {head_dim}"
    return None


def torch_varlen_obstacle(device: torch.device) -> str | None:
    """Why torch's own varlen kernel cannot run on this device."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401  since torch 2.10
    except ImportError as error:
        return f"torch {torch.__version__} lacks it: {error}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0"
    return None


@functools.cache
def _torch_varlen_settings() -> tuple[Any, dict[str, Any]]:
    """torch's function, and how this version of it is told to be causal with fewer key heads than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    shared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # since 2.12
    return varlen_attn, {"window_size": (-1, 0), **shared}


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBorders) -> Tensor:
    attend, settings = _torch_varlen_settings()
    borders, longest = sequences.cu_seqlens, sequences.longest
    return attend(q, k, v, borders, borders, longest, longest, **settings)


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBorders) -> Tensor:
    flash: Any = import_flash_attention()[0]
    borders, longest = sequences.cu_seqlens, sequences.longest
    return flash.flash_attn_varlen_func(q, k, v, borders, borders, longest, longest, causal=True)


def dense_varlen(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBorders) -> Tensor:
    lengths = [b - a for a, b in zip(sequences.borders, sequences.borders[1:])]
    # Neighbours of one length, often the samples of one prompt that were cut, are one batch: same bits, fewer calls.
    runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths) if length]
    # Split and not sliced: the gradient of one split is one cat, that of each slice a whole tensor of zeros.
    parts = zip(*(x.split([length * count for length, count in runs]) for x in (q, k, v)))
    pieces = [_dense(*part, sequences=count) for part, (_, count) in zip(parts, runs)]
    return torch.cat(pieces) if pieces else torch.empty_like(q)


def _dense(q: Tensor, k: Tensor, v: Tensor, sequences: int = 1) -> Tensor:
    """Attention of so many sequences of one length that lie one after another, [T, heads, D] in and out."""
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
