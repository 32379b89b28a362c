"""Triton kernels are not launched but counted, after what a launch would refuse or read wrongly has been looked for.

A kernel gets addresses: it sees neither a tensor's device nor its strides, unless they are among its integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from rlhfuse.rehearsal.tensors import FakeCuda

DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
}


def count_launches(mode: FakeCuda) -> None:
    """Put this in the place of every launch."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mode.launches[self.__name__] += 1
        names = dict(zip(self.arg_names, args)) | kwargs
        integers = {value for value in names.values() if isinstance(value, int)}
        for name, value in names.items():
            if isinstance(value, Tensor):
                _refuse(self.__name__, name, value, integers)
        sizes: Any = grid(names) if callable(grid) else grid
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise RuntimeError(f"{self.__name__}: a grid of {sizes}")

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    JITFunction.run, Autotuner.run = run, tune  # type: ignore[method-assign]


def _refuse(kernel: str, name: str, tensor: Tensor, integers: set[int]) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError(f"{kernel}: {name} is on the {tensor.device.type}")
    if tensor.dtype not in DTYPES:
        raise RuntimeError(f"{kernel}: {name} is {tensor.dtype}")
    strides = {stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and stride != 1}
    if not tensor.is_contiguous() and not strides <= integers:
        raise RuntimeError(
            f"{kernel}: {name} is not contiguous, {list(tensor.shape)} with strides {list(tensor.stride())}, "
            "and these are not among its arguments"
        )
