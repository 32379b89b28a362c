"""A tile of logits read once for its sums, and once for its gradient; as `tile_sums` and `tile_gradient` of torch.

Letters: R rows, W columns. A program of the first takes a row, of the second a part of one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

Known = tuple[Tensor, Tensor, Tensor, Tensor | None]  # as in tile_sums.py

BLOCK = 2048  # columns at a time
# As long as micro-batches are, or parts of what is: no kernel is compiled for an address.
ROWS = ["targets", "sums", "log_totals", "entropies", "by_logprobs", "by_entropies"]


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ROWS)
def _sums(logits, targets, sums, width, temperature, BLOCK: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    target = tl.load(targets + row)
    top, total, moment, picked = -1e30, 0.0, 0.0, 0.0  # of no logit: finite, because it is multiplied by zero
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        z = tl.load(logits + row * width + at, mask=inside, other=-float("inf")) / temperature
        higher = tl.maximum(top, tl.max(z, axis=0))
        weights, shrink = tl.exp(z - higher), tl.exp(top - higher)
        moment = (moment + (top - higher) * total) * shrink
        moment += tl.sum(weights * tl.where(inside, z - higher, 0.0), axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        picked += tl.sum(tl.where(inside & (at == target), z, 0.0), axis=0)
        top = higher
    tl.store(sums + row, top)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, moment)
    tl.store(sums + 3 * rows + row, picked)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ROWS)
def _gradient(
    logits,
    targets,
    log_totals,
    entropies,
    by_logprobs,
    by_entropies,
    out,
    width,
    temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    z = tl.load(logits + row * width + at, mask=inside, other=0.0) / temperature - tl.load(log_totals + row)
    down = tl.load(by_logprobs + row) / temperature
    slope = tl.zeros_like(z) + down
    if ENTROPY:
        slope += (z + tl.load(entropies + row)) * tl.load(by_entropies + row) / temperature
    gradient = tl.where(at == tl.load(targets + row), down, 0.0) - tl.exp(z) * slope
    tl.store(out + row * width + at, gradient.to(out.dtype.element_ty), mask=inside)


def tile_sums(logits_RW: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
    """Sums [4, R] of a tile, contiguous and float32."""
    rows, width = logits_RW.shape
    sums, size = logits_RW.new_empty(4, rows), dict[str, Any](BLOCK=BLOCK, num_warps=8)
    if rows:
        _sums[(rows,)](logits_RW, targets_R, sums, width, temperature, **size)
    return sums


def tile_gradient(logits_RW: Tensor, targets_R: Tensor, temperature: float, known: Known, out_RW: Tensor) -> Tensor:
    """Gradient [R, W] of the logits, written to `out`, which is contiguous."""
    rows, width = logits_RW.shape
    *given, by_entropy_R = known
    given.append(given[-1] if by_entropy_R is None else by_entropy_R)
    size: Any = dict(ENTROPY=by_entropy_R is not None, BLOCK=BLOCK, num_warps=8)
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        given = targets_R, *given, out_RW
        _gradient[grid](logits_RW, *given, width, temperature, **size)  # pyright: ignore[reportCallIssue]
    return out_RW
