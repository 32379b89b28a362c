"""Arithmetic whose result for one row does not depend on the other rows, and a test that it is so here.

Stock torch on CPU breaks this in three places: a GEMM of few rows, a matrix-vector product (one output), and the last
elements of an element-wise function. Each is padded to a safe size (docs/explanation/engine.md). Bits are
promised for float32 with one thread per process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.models.cpu.row_norm import row_norm
from rlhfuse.models.cpu.swiglu import swiglu as gate_and_up

SAFE_ROWS = 16  # the GEMM library sums in another order for fewer
SAFE_OUTPUTS = 8  # a single output is a matrix-vector product, whose order depends on the row count
SAFE_WIDTH = 32  # exp of the last elements of a buffer is computed by other code than the rest
TESTED_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 48, 64, 100, 256)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] @ weight [N, K]^T."""
    if weight.shape[0] < SAFE_OUTPUTS:
        wide = linear(x, F.pad(weight, (0, 0, 0, SAFE_OUTPUTS - weight.shape[0])))
        return wide[..., : weight.shape[0]]
    rows = x.numel() // x.shape[-1]
    if rows >= SAFE_ROWS:
        return F.linear(x, weight)
    padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, SAFE_ROWS - rows))
    return F.linear(padded, weight)[:rows].reshape(*x.shape[:-1], len(weight))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), [..., W]."""
    spare = -x.shape[-1] % SAFE_WIDTH
    if spare:
        return F.silu(F.pad(x, (0, spare)))[..., : x.shape[-1]]
    return F.silu(x.contiguous())


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, [..., W], of x [..., 2 W], gate and up side by side."""
    if x.dtype == torch.float32:
        return gate_and_up(x)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, as Hugging Face Llama does."""
    if x.dtype == weight.dtype == torch.float32:
        return row_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def check_rows(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Raise InputError naming `name` unless function(x[:m]) == function(x)[:m] bit for bit for every m."""
    whole = function(x)
    for m in TESTED_ROWS:
        if not torch.equal(function(x[:m]), whole[:m]):
            raise InputError(
                f"{name} with {torch.get_num_threads()} threads gives other bits for {m} rows than for {x.shape[0]}; "
                "use OMP_NUM_THREADS=1"
            )


def self_test(*, hidden: int, mlp: int, vocab: int) -> None:
    """Check every rule on this machine at a model's widths, in float32. Raises InputError naming what breaks.

    `mlp` and `vocab` are this rank's shares. Attention needs no check: every head of every sequence is computed by
    itself, batched or not.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = max(TESTED_ROWS)
    with torch.no_grad():
        layers = (("hidden", hidden, hidden), ("fc1", hidden, 2 * mlp), ("fc2", mlp, hidden))
        for name, width, out in (*layers, ("output", hidden, vocab), ("value head", hidden, 1)):
            weight = draw(out, width)
            check_rows(f"linear {name} [{width} -> {out}]", lambda x: linear(x, weight), draw(rows, width))
        check_rows(f"swiglu [{mlp}]", swiglu, draw(rows, 2 * mlp))
        weight = draw(hidden)
        check_rows(f"rms_norm [{hidden}]", lambda x: rms_norm(x, weight, 1e-6), draw(rows, hidden))
        check_rows(f"log_softmax [{vocab}]", lambda x: x.float().log_softmax(-1), draw(rows, vocab))
