"""A kernel that holds its multiprocessors until a number in device memory is not 0: what a posted receive does."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def spin(flag):
    while tl.atomic_add(flag, 0) == 0:
        pass


def hold(flag: torch.Tensor, blocks: int) -> None:
    """Spin in so many blocks of 512 threads on the current stream; flag [1] int32."""
    kernel: Any = spin
    kernel[(blocks,)](flag, num_warps=16)
