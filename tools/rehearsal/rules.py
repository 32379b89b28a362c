"""What CUDA kernels and NCCL refuse and shapes alone do not show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ONE_DTYPE = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "dot"}
INT64_INDEX = dict.fromkeys(
    ("index_copy", "index_copy_", "index_add", "index_add_", "gather", "scatter", "scatter_", "scatter_add_"), 2
)
INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def refuse_bad_operands(func: Any, args: Any) -> None:
    """Raise RuntimeError for dtypes, and for tensors on two devices, that a CUDA kernel refuses."""
    name = func._schema.name.removeprefix("aten::")
    if name in ONE_DTYPE:
        ends_in = [value for value in args if isinstance(value, torch.dtype)]  # of 16-bit factors, a sum in float32
        summed = ends_in and args[0].dtype == ends_in[0]
        kinds = {value.dtype for value in args[1 if summed else 0 :] if isinstance(value, Tensor)}
        if len(kinds) > 1:
            raise RuntimeError(f"{name} of {' and '.join(sorted(map(str, kinds)))}")
    elif name in INT64_INDEX:
        if (dtype := args[INT64_INDEX[name]].dtype) != torch.int64:
            raise RuntimeError(f"{name}: the index is {dtype}, not torch.int64")
    elif name in ("index", "index_put_", "index_put"):
        for index in args[1]:
            if index is not None and index.dtype not in INDICES:
                raise RuntimeError(f"{name}: an index is {index.dtype}")


def refuse_bad_collective(name: str, tensors: Iterable[Tensor]) -> str | None:
    """Why NCCL would not take these tensors, one of them at least as large as a weight or on CUDA; None if it does."""
    for tensor in tensors:
        if tensor.device.type != "cuda":
            return f"{name} of a tensor on the CPU: {list(tensor.shape)}"
        if not tensor.is_contiguous():
            return f"{name} of a tensor that is not contiguous: {list(tensor.shape)}, strides {list(tensor.stride())}"
    return None
