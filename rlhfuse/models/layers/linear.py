"""A product with a weight on CPU by which a row's bits do not depend on the other rows.

Torch's own sums in another order where there are few rows, or one output; both are filled up to a safe count.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

SAFE_ROWS = 16  # the GEMM library sums in another order for fewer
SAFE_OUTPUTS = 8  # a single output is a matrix-vector product, whose order depends on the row count


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] @ weight [N, K]^T."""
    if weight.shape[0] < SAFE_OUTPUTS:
        wide = exact_linear(x, F.pad(weight, (0, 0, 0, SAFE_OUTPUTS - weight.shape[0])))
        return wide[..., : weight.shape[0]]
    rows = x.numel() // x.shape[-1]
    if rows >= SAFE_ROWS:
        return F.linear(x, weight)
    padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, SAFE_ROWS - rows))
    return F.linear(padded, weight)[:rows].reshape(*x.shape[:-1], len(weight))
