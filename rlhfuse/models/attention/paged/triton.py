"""Triton kernels of our own over cache blocks of any size (triton_kernels.py)."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rlhfuse.models.attention.paged.cache import Attend, CacheShape, PagedQueries


def obstacle(shape: CacheShape) -> str:
    """Why it cannot serve, '' if it can."""
    device = shape.device
    if not 1 <= shape.head_dim <= 256:
        return f"the Triton kernels take a head_dim of up to 256, not {shape.head_dim}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernels need compute capability 8.0"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton computes on CUDA, and on {device.type} only in its interpreter (TRITON_INTERPRET=1)"
    try:
        import rlhfuse.models.attention.paged.triton_kernels  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return ""


class TritonAttention:
    def __init__(self, shape: CacheShape) -> None:
        from rlhfuse.models.attention.paged import triton_kernels  # Triton is not for runs on the CPU

        self._kernels = triton_kernels
        # how many parts of a row and head have ended
        self._counters = torch.zeros(shape.most_sequences * shape.kv_heads, dtype=torch.int32, device=shape.device)
        on_cuda = shape.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(shape.device).multi_processor_count if on_cuda else 1

    def decode(self, tables: Tensor, contexts: Tensor) -> Attend:
        runs = tables, contexts, self._counters, self._processors
        return lambda q, keys, values: self._kernels.decode(q, keys, values, *runs)

    def mixed(self, queries: PagedQueries) -> Attend:
        return lambda q, keys, values: self._kernels.mixed(q, keys, values, queries, self._counters, self._processors)
