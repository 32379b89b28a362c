"""A test at start that on this CPU the result for one row does not depend on the other rows.

Stock torch breaks this in three places: a GEMM of few rows, a matrix-vector product (one output), and the last elements
of an element-wise function. Each is padded to a safe size, or is a kernel of our own (docs/explanation/engine.md). Bits
are promised for float32 with one thread per process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.models.layers.operations import EXACT, Operations

TESTED_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 48, 64, 100, 256)


def check_rows(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Raise InputError naming `name` unless function(x[:m]) == function(x)[:m] bit for bit for every m."""
    whole = function(x)
    for m in TESTED_ROWS:
        if not torch.equal(function(x[:m]), whole[:m]):
            raise InputError(
                f"{name} with {torch.get_num_threads()} threads gives other bits for {m} rows than for {x.shape[0]}; "
                "use OMP_NUM_THREADS=1"
            )


def self_test(operations: Operations = EXACT, *, hidden: int, mlp: int, vocab: int) -> None:
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
            check_rows(f"linear {name} [{width} -> {out}]", lambda x: operations.linear(x, weight), draw(rows, width))
        check_rows(f"swiglu [{mlp}]", operations.swiglu, draw(rows, 2 * mlp))
        weight = draw(hidden)
        check_rows(f"rms_norm [{hidden}]", lambda x: operations.rms_norm(x, weight, 1e-6), draw(rows, hidden))
        check_rows(f"log_softmax [{vocab}]", lambda x: x.float().log_softmax(-1), draw(rows, vocab))
