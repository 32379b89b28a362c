"""Triton kernels are not launched but counted, after what a launch would refuse or read wrongly has been looked for.

A kernel gets addresses: it sees neither a tensor's device nor its strides, unless they are among its integers. What it
is compiled for, alignments among it, must have occurred before a program runs: peers would wait for the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rehearsal.tensors import FakeCuda, place
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, create_function_from_signature

IN_PROGRAM = "training instruction"  # as the executor calls each that it runs
DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
}


@dataclass(frozen=True)
class _Address:
    """What Triton looks at of a tensor, of which there need be no memory."""

    dtype: torch.dtype
    offset: int  # bytes behind the start of an allocation, which is aligned

    def data_ptr(self) -> int:
        return self.offset


def compiled_for(kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[str, str]:
    """What a launch needs a kernel compiled for: constants and options, and what Triton specializes on beside these
    (types, alignment of addresses, divisibility of integers)."""
    given = [_address(value) for value in args], {name: _address(value) for name, value in options.items()}
    _, keys, others = _binder(kernel)(*given[0], **given[1])
    named = list(zip(kernel.arg_names, keys))
    constants = [(name, str(key[1])) for name, key in named if key[0] == "constexpr"]
    return str((constants, others)), str([(name, key) for name, key in named if key[0] != "constexpr"])


def _address(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Address(value.dtype, int(value.storage_offset()) * value.element_size())


@functools.cache
def _binder(kernel: Any) -> Callable[..., Any]:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def count_launches(mode: FakeCuda) -> None:
    """Put this in the place of every launch."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mode.launches[self.__name__] += 1
        variant = self.__name__, *compiled_for(self, args, kwargs)
        if variant not in mode.variants and mode.doing.startswith(IN_PROGRAM):
            mode.problems[f"{self.__name__} is compiled in the middle of a program, not before, at {place()}"] += 1
        mode.variants.add(variant)
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
