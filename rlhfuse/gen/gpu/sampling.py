"""The draw of gen/sampler.py as Triton kernels: the scores, kept tokens and noise of gen/cpu/sampling.py, bit by bit.

cutoffs  rows with top-k or top-p: the least logit kept, by bisection on the order of float32 bit patterns
scores   a row's logits in chunks: highest logit, sum of exponentials, best score and its token
merge    a row's chunks to one token and its log-probability
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhfuse.base.power_of_two import power_of_two
from rlhfuse.gen.gpu.draws import DrawInputs

# Formulas are those of models/cpu/elementwise.py in the same order, so no launch may fuse multiply and add.

CHUNK = 2048  # logits of one program
CUTOFF_BLOCK = 8192  # logits that a program of the bisection holds at a time
MOST_VOCAB = 1 << 22  # beyond, sums in units of 2**-40 could leave int64
_LOG2E = tl.constexpr(1.44269504088896341)
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)
_ROUNDER = tl.constexpr(12582912.0)
_SQRT_HALF = tl.constexpr(0.707106781186547524)
_LOWEST = tl.constexpr(-87.0)
_UNIT, _PART = tl.constexpr(2.0**40), tl.constexpr(2.0**-40)
# Where a step's integers, and the second half of what two tensors share, begin follows from its rows.
_SHIFTING = ["words", "moments", "best"]


def draw(logits: Tensor, inputs: DrawInputs, outputs: Tensor) -> None:
    """Tokens (-1: not finite) and the bits of their float32 log-probabilities into `outputs` [2, rows or more] int32.

    Where it has a third row, the bits of the distributions' float32 entropies go there.
    logits [rows, vocab] float32 or bfloat16, columns side by side. Three launches, nothing read back.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and vocab <= MOST_VOCAB and inputs.rows == rows, f"{logits.shape} {inputs.rows}"
    splits = -(-vocab // CHUNK)
    cutoffs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    highest, best = torch.empty((2, rows, splits), dtype=torch.float32, device=logits.device)
    measures = len(outputs) == 3
    totals, moments = torch.empty((2, rows, splits), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    given = logits, logits.stride(0), vocab, inputs.packed, rows
    parts = highest, totals, moments, best, tokens
    _run(_cutoffs, (rows,), *given, cutoffs, BLOCK=CUTOFF_BLOCK, num_warps=16)
    block, room = min(power_of_two(vocab), CHUNK), power_of_two(splits)
    _run(_scores, (rows, splits), *given, cutoffs, *parts, BLOCK=block, MEASURES=measures, num_warps=8)
    last = splits, outputs, outputs.stride(0)
    _run(_merge, (rows,), *given, *parts, *last, SPLITS=room, MEASURES=measures, num_warps=1)


def feed(tokens: Tensor, newest: Tensor) -> None:
    """Tokens ~i become the i-th of `newest`, in place: both int32, one launch."""
    rows = tokens.numel()
    _run(_feed, (-(-rows // 1024),), tokens, newest, rows, BLOCK=1024)


def _run(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: int) -> None:
    kernel[grid](*arguments, **options, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["rows"])
def _feed(tokens, newest, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row, mask=row < rows, other=0)
    tl.store(tokens + row, tl.load(newest + ~token, mask=token < 0, other=0), mask=token < 0)


@triton.jit
def _exp(x):
    """exp32."""
    low = tl.maximum(x, _LOWEST)
    shifted = low * _LOG2E + _ROUNDER
    whole = shifted - _ROUNDER
    r = low - whole * _LN2_HIGH - whole * _LN2_LOW
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * r * r + r + 1.0
    bits = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(x >= _LOWEST, bits.to(tl.float32, bitcast=True), tl.where(x == x, 0.0, x))


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < _SQRT_HALF
    return mantissa + tl.where(low, mantissa, 0.0) - 1.0, exponent - tl.where(low, 1.0, 0.0)


@triton.jit
def _log_near_one(f, exponent):
    z = f * f
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    y = p * f * z + exponent * _LN2_LOW - z * 0.5
    return f + y + exponent * _LN2_HIGH


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _noise_hash(key0, key1, index):
    """noise_hash: all uint32."""
    return _mix(_mix((index * 0x9E3779B9) ^ key0) + key1)


@triton.jit
def _gumbel(h):
    """-log32(exponential(h))."""
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    f, exponent = _split(1.0 - u)  # pyright: ignore[reportGeneralTypeIssues]  # Triton inlines it
    f, exponent = _split(-_log_near_one(tl.where(exponent == 0.0, -u, f), exponent))
    return -_log_near_one(f, exponent)


@triton.jit
def _order(x):
    """int32 that is larger for a larger float32; its own inverse on bits. Both zeros are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _allowed(logits, index, vocab, words, rows, bans):
    """Logits as float32, minus infinity where banned or outside. words: of this row, `rows` apart."""
    x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    for number in range(bans):
        x = tl.where(index == tl.load(words + (7 + number) * rows), float("-inf"), x)
    return x


@triton.jit
def _sums(logits, vocab, words, rows, bans, temperature, highest, above, BLOCK: tl.constexpr):
    """Sums over the logits whose order is over `above`: their number, their exponentials in units of 2**-40 and, what
    that leaves, of 2**-80; the lowest order among them, and the highest among the others."""
    count = tl.zeros((), tl.int32)
    high, low = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    next_up, next_down = tl.full((), 2147483647, tl.int32), tl.full((), -2147483648, tl.int32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = _allowed(logits, index, vocab, words, rows, bans)
        x = tl.where(x == x, x, float("-inf"))
        order = _order(x)
        over = order > above
        count += tl.sum(over.to(tl.int32), axis=0)
        whole, rest = _units(tl.where(over, _exp(tl.div_rn(x, temperature) - highest), 0.0))
        high += tl.sum(whole, axis=0)
        low += tl.sum(rest, axis=0)
        next_up = tl.minimum(next_up, tl.min(tl.where(over, order, 2147483647), axis=0))
        next_down = tl.maximum(next_down, tl.max(tl.where(over, -2147483648, order), axis=0))
    return count, high, low, next_up, next_down


@triton.jit
def _units(x):
    """x in [0, 1] as whole * 2**-40 + rest * 2**-80, both int64: sums of these are exact in any order."""
    scaled = x * _UNIT
    whole = scaled.to(tl.int64)
    return whole, ((scaled - whole.to(tl.float32)) * _UNIT).to(tl.int64)


@triton.jit
def _number(high, low):
    return (high.to(tl.float64) + low.to(tl.float64) * _PART) * _PART


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_SHIFTING)
def _cutoffs(logits, stride, vocab, words, rows, cutoffs, BLOCK: tl.constexpr):
    """row_cutoff of gen/cpu/sampling.py: the same logit, but where the exact share of probability is within a float64
    rounding of top_p. One program a row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    words += row
    temperature = tl.load(words + 2 * rows).to(tl.float32, bitcast=True)
    top_k = tl.load(words + 3 * rows)
    low_word, high_word = tl.load(words + 4 * rows).to(tl.int64), tl.load(words + 5 * rows).to(tl.int64)
    top_p = ((high_word << 32) | (low_word & 0xFFFFFFFF)).to(tl.float64, bitcast=True)
    limited = (top_k > 0) & (top_k < vocab)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & (limited | (top_p < 1)):
        bans = tl.load(words + 6 * rows)
        lowest, highest = tl.full((), float("inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = _allowed(logits, index, vocab, words, rows, bans)
            highest = tl.maximum(highest, tl.max(tl.where(x == x, x, float("-inf")), axis=0))
            x = tl.where((index < vocab) & (x == x), x, float("inf"))
            lowest = tl.minimum(lowest, tl.min(x, axis=0))
        first, last = _order(lowest), _order(highest)  # orders of logits: the answer lies between them
        highest = tl.div_rn(highest, temperature)
        left = vocab  # tokens that top-k leaves
        if limited:
            left = top_k
            upper = last
            while first < upper:
                middle = ((first.to(tl.int64) + upper.to(tl.int64)) >> 1).to(tl.int32)
                count, high, low, up, down = _sums(
                    logits, vocab, words, rows, bans, temperature, highest, middle, BLOCK
                )
                first, upper = tl.where(count < left, first, up), tl.where(count < left, down, upper)
        if top_p < 1:
            count, high, low, up, down = _sums(logits, vocab, words, rows, bans, temperature, highest, first, BLOCK)
            value = (first ^ ((first >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            whole, rest = _units(_exp(tl.div_rn(value, temperature) - highest))
            ties = (left - count).to(tl.int64)  # of the tokens that equal the last, those within the top k
            share = top_p * _number(high + ties * whole, low + ties * rest)
            while first < last:
                middle = ((first.to(tl.int64) + last.to(tl.int64)) >> 1).to(tl.int32)
                count, high, low, up, down = _sums(
                    logits, vocab, words, rows, bans, temperature, highest, middle, BLOCK
                )
                within = _number(high, low) < share
                first, last = tl.where(within, first, up), tl.where(within, down, last)
        cutoff = (first ^ ((first >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(cutoffs + row, cutoff)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_SHIFTING)
def _scores(
    logits,
    stride,
    vocab,
    words,
    rows,
    cutoffs,
    highest,
    totals,
    moments,
    best,
    tokens,
    BLOCK: tl.constexpr,
    MEASURES: tl.constexpr,
):
    """A chunk's highest logit / temperature, its sum of exponentials below that, its best score and that token; and
    where it measures the sum of these exponentials times their exponents."""
    row, part = tl.program_id(0), tl.program_id(1)
    words += row
    temperature = tl.load(words + 2 * rows).to(tl.float32, bitcast=True)
    if temperature >= 0:  # negative: a row that draws nothing
        index = part * BLOCK + tl.arange(0, BLOCK)
        logits += row.to(tl.int64) * stride
        x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
        most = tl.max(tl.where(scaled == scaled, scaled, float("-inf")), axis=0)
        terms = _exp(scaled - tl.where(most > float("-inf"), most, 0.0))
        score = _allowed(logits, index, vocab, words, rows, tl.load(words + 6 * rows))
        if temperature > 0:
            key0, key1 = tl.load(words).to(tl.uint32, bitcast=True), tl.load(words + rows).to(tl.uint32, bitcast=True)
            kept = score >= tl.load(cutoffs + row)
            score = tl.div_rn(score, temperature) + _gumbel(_noise_hash(key0, key1, index.to(tl.uint32)))
            score = tl.where(kept, score, float("-inf"))
        top, where = tl.max(tl.where(score == score, score, float("-inf")), axis=0, return_indices=True)
        at = row * tl.num_programs(1) + part
        tl.store(highest + at, most)
        tl.store(totals + at, tl.sum(terms.to(tl.float64), axis=0))
        if MEASURES:
            products = terms * tl.where(terms > 0, scaled - most, 0.0)
            tl.store(moments + at, tl.sum(products.to(tl.float64), axis=0))
        tl.store(best + at, top)
        tl.store(tokens + at, part * BLOCK + where)


@triton.jit(do_not_specialize=["rows", "next_row"], do_not_specialize_on_alignment=_SHIFTING)
def _merge(
    logits,
    stride,
    vocab,
    words,
    rows,
    highest,
    totals,
    moments,
    best,
    tokens,
    splits,
    outputs,
    next_row,
    SPLITS: tl.constexpr,
    MEASURES: tl.constexpr,
):
    row, part = tl.program_id(0), tl.arange(0, SPLITS)
    temperature = tl.load(words + 2 * rows + row).to(tl.float32, bitcast=True)
    if temperature >= 0:
        at, inside = row * splits + part, part < splits
        most = tl.load(highest + at, mask=inside, other=float("-inf"))
        top = tl.max(most, axis=0)
        factors = tl.exp(tl.where(most > float("-inf"), most - top, float("-inf")).to(tl.float64))
        own = tl.load(totals + at, mask=inside, other=0.0)
        total = tl.sum(own * factors, axis=0)
        score, where = tl.max(tl.load(best + at, mask=inside, other=float("-inf")), axis=0, return_indices=True)
        token = tl.load(tokens + row * splits + where)
        # Sums of rows with a NaN or an infinity are NaN or without end; comparisons with NaN are false.
        good = (top > float("-inf")) & (top < float("inf")) & (total > 0) & (score > float("-inf"))
        x = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
        x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)) - top
        logprob = tl.where(good, x.to(tl.float64) - tl.log(total), float("nan")).to(tl.float32)
        tl.store(outputs + row, tl.where(good, token, -1))
        tl.store(outputs + next_row + row, logprob.to(tl.int32, bitcast=True))
        if MEASURES:
            below = tl.where(most > float("-inf"), most - top, 0.0).to(tl.float64)
            moment = tl.sum((tl.load(moments + at, mask=inside, other=0.0) + below * own) * factors, axis=0)
            entropy = tl.where(good, tl.log(total) - moment / total, float("nan")).to(tl.float32)
            tl.store(outputs + 2 * next_row + row, entropy.to(tl.int32, bitcast=True))
