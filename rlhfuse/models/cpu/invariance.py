"""Arithmetic whose result for one row does not depend on the other rows, and a test that it is so here.

Stock torch on CPU breaks this in three places, and the rules against it live here alone:

    linear     the GEMM library sums in another order for few rows: rows are padded up to SAFE_ROWS
               a single output (a value head) is a matrix-vector product, whose order depends on the row count:
               outputs are padded up to SAFE_OUTPUTS
    silu       exp of the last elements of a buffer is computed by other code than the rest: the width is
               padded up to a multiple of SAFE_WIDTH

All functions are plain torch with autograd, on any device. `self_test` runs each of them at a model's own
widths with many row counts, and names the first that breaks: several threads on large matrices, or another GEMM
library, may. Bits are promised for float32 on CPU with one thread per process; on CUDA they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.errors import InputError

SAFE_ROWS = 16
SAFE_OUTPUTS = 8
SAFE_WIDTH = 32
TESTED_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 48, 64, 100, 256)


def pad_rows(x: Tensor, rows: int = SAFE_ROWS) -> Tensor:
    """`x` [M, ...] with zero rows added until there are `rows` of them; `x` itself if there are."""
    missing = rows - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias; the bits of a row do not depend on how many rows there are."""
    if weight.shape[0] < SAFE_OUTPUTS:
        spare = SAFE_OUTPUTS - weight.shape[0]
        wide = linear(x, F.pad(weight, (0, 0, 0, spare)), None if bias is None else F.pad(bias, (0, spare)))
        return wide[..., : weight.shape[0]]
    rows = x.numel() // x.shape[-1]
    if rows >= SAFE_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(pad_rows(x.reshape(rows, x.shape[-1])), weight, bias)[:rows].reshape(*x.shape[:-1], -1)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), [..., W]."""
    spare = -x.shape[-1] % SAFE_WIDTH
    if spare:
        return F.silu(F.pad(x, (0, spare)))[..., : x.shape[-1]]
    return F.silu(x.contiguous())


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2 * W], the gate first; returns [..., W]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, as Hugging Face Llama does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def log_softmax(x: Tensor) -> Tensor:
    """Log-probabilities over the last dimension, in float32."""
    return F.log_softmax(x.float(), dim=-1)


def check_rows(name: str, function: Callable[[Tensor], Tensor], x: Tensor, rows: Iterable[int] = TESTED_ROWS) -> None:
    """Raise InputError naming `name` unless function(x[:m]) == function(x)[:m] bit for bit for every m."""
    whole = function(x)
    for m in rows:
        if m <= x.shape[0] and not torch.equal(function(x[:m]), whole[:m]):
            raise InputError(
                f"{name} on {x.device.type} in {str(x.dtype).removeprefix('torch.')} with {torch.get_num_threads()} "
                f"threads gives other bits for {m} rows than for {x.shape[0]}; use float32 and OMP_NUM_THREADS=1"
            )


def self_test(
    *, hidden: int, mlp: int, vocab: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Check every rule on this machine at a model's widths. Raises InputError naming what breaks; ~0.1 s if small.

    `mlp` and `vocab` are this rank's shares. Attention needs no check: every head of every sequence is computed by
    itself, batched or not.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    rows = max(TESTED_ROWS)
    with torch.no_grad():
        for name, width, out in (("hidden", hidden, hidden), ("fc1", hidden, 2 * mlp), ("fc2", mlp, hidden)):
            weight = draw(out, width)
            check_rows(f"linear {name} [{width} -> {out}]", lambda x: linear(x, weight), draw(rows, width))
        weight = draw(vocab, hidden)
        check_rows(f"linear output [{hidden} -> {vocab}]", lambda x: linear(x, weight), draw(rows, hidden))
        weight = draw(1, hidden)
        check_rows(f"linear value head [{hidden} -> 1]", lambda x: linear(x, weight), draw(rows, hidden))
        check_rows(f"silu [{mlp}]", silu, draw(rows, mlp))
        check_rows(f"silu_mul [{mlp}]", silu_mul, draw(rows, 2 * mlp))
        weight = draw(hidden)
        check_rows(f"rms_norm [{hidden}]", lambda x: rms_norm(x, weight, 1e-6), draw(rows, hidden))
        check_rows(f"log_softmax [{vocab}]", log_softmax, draw(rows, vocab))
