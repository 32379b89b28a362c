"""The draw of sampler.py for CPU: a numba kernel, each row by itself in a fixed order.

Rows are read in chunks of CHUNK tokens, one short loop for each formula, so that LLVM vectorises every loop. Sums
run over CHUNK lanes in float64; the best token is kept for each lane, and the lanes are compared at the end.
Several threads take several rows, so bits do not depend on them. Knows nothing of torch.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from rlhfuse.gen.cpu.topp_cutoff import row_threshold
from rlhfuse.models.cpu.elementwise import F32, exp32, log32, neg_log_one_minus

CHUNK = 64
_U32 = np.uint32
_U64 = np.uint64


@njit(cache=True, nogil=True)
def noise_keys(streams, positions):
    """Two 32-bit numbers [R, 2] for each (stream, position): one round of splitmix64. streams [R] uint64."""
    keys = np.empty((streams.shape[0], 2), np.uint32)
    for r in range(streams.shape[0]):
        state = (streams[r] ^ _U64(positions[r])) + _U64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> _U64(27))) * _U64(0x94D049BB133111EB)
        state ^= state >> _U64(31)
        keys[r, 0], keys[r, 1] = _U32(state), _U32(state >> _U64(32))
    return keys


@njit(forceinline=True)
def _mix(h):
    h = _U32(_U32(h ^ (h >> _U32(16))) * _U32(0x7FEB352D))
    h = _U32(_U32(h ^ (h >> _U32(15))) * _U32(0x846CA68B))
    return _U32(h ^ (h >> _U32(16)))


@njit(forceinline=True)
def noise_hash(key0, key1, index):
    """The hash of (key, index): uint32."""
    return _mix(_U32(_mix(_U32(_U32(index) * _U32(0x9E3779B9)) ^ key0) + key1))


@njit(forceinline=True)
def exponential(h):
    """-log(1 - u) with u = h / 2**32 of a hash h: float32. Gumbel noise is minus its logarithm."""
    u = (F32(h) + F32(0.5)) * F32(2.0**-32)
    return neg_log_one_minus(u if u < F32(1 - 2.0**-24) else F32(1 - 2.0**-24))


@njit
def _highest(row, temperature, lanes):
    """max(row / temperature); a NaN is passed over, the sum of exponentials finds it."""
    for j in range(CHUNK):
        lanes[j] = F32(-np.inf)
    for start in range(0, row.shape[0], CHUNK):
        for j in range(min(CHUNK, row.shape[0] - start)):
            x = row[start + j] / temperature
            lanes[j] = x if x > lanes[j] else lanes[j]
    highest = lanes[0]
    for j in range(CHUNK):
        highest = lanes[j] if lanes[j] > highest else highest
    return highest


@njit
def _partition(row, temperature, highest, terms):
    """Sum of exp(row / temperature - highest)."""
    lanes = np.zeros(CHUNK, np.float64)
    for start in range(0, row.shape[0], CHUNK):
        width = min(CHUNK, row.shape[0] - start)
        for j in range(width):
            terms[j] = exp32(row[start + j] / temperature - highest)
        for j in range(width):
            lanes[j] += np.float64(terms[j])
    total = 0.0
    for j in range(CHUNK):
        total += lanes[j]
    return total


@njit
def _score(row, start, width, key0, key1, temperature, threshold, hashes, scores):
    """scores[:width] = row / temperature + noise of tokens start and on; minus infinity below the threshold."""
    for j in range(width):
        hashes[j] = noise_hash(key0, key1, start + j)
    for j in range(width):
        scores[j] = exponential(hashes[j])
    for j in range(width):
        score = row[start + j] / temperature - log32(scores[j])
        scores[j] = score if row[start + j] >= threshold else F32(-np.inf)


@njit
def _best_token(row, key0, key1, temperature, threshold, scores):
    """The token of the highest score, the first of equal ones; -1 if all are minus infinity. Temperature 0: greedy."""
    best, where = np.full(CHUNK, -np.inf, np.float32), np.zeros(CHUNK, np.int32)
    hashes = np.empty(CHUNK, np.uint32)
    for start in range(0, row.shape[0], CHUNK):
        width = min(CHUNK, row.shape[0] - start)
        if temperature > 0:
            _score(row, start, width, key0, key1, temperature, threshold, hashes, scores)
        else:
            for j in range(width):
                scores[j] = row[start + j]
        for j in range(width):
            where[j] = np.int32(start) if scores[j] > best[j] else where[j]
            best[j] = scores[j] if scores[j] > best[j] else best[j]
    highest, token = F32(-np.inf), -1
    for j in range(CHUNK):
        if best[j] > highest or (best[j] == highest and token >= 0 and where[j] + j < token):
            highest, token = best[j], where[j] + j
    return token


@njit(inline="never")
def _draw_row(row, key0, key1, temperature, top_k, top_p, banned):
    """(token, log-probability) of one row; (-1, NaN) if it holds a number that is not finite."""
    scratch = np.empty(CHUNK, np.float32)
    unit = temperature if temperature > 0 else F32(1.0)
    highest = _highest(row, unit, scratch)
    log_total = np.log(_partition(row, unit, highest, scratch))
    if not (np.isfinite(highest) and np.isfinite(log_total)):
        return -1, F32(np.nan)
    allowed = row
    if banned.shape[0] and banned.max() >= 0:
        allowed = row.copy()
        for token in banned:
            if token >= 0:
                allowed[token] = F32(-np.inf)
    threshold = F32(-np.inf)
    if temperature > 0 and (0 < top_k < row.shape[0] or top_p < 1):
        threshold = row_threshold(allowed, temperature, top_k, top_p)
    token = _best_token(allowed, key0, key1, temperature, threshold, scratch)
    if token < 0:
        return -1, F32(np.nan)
    return token, F32(np.float64(row[token] / unit - highest) - log_total)


@njit(cache=True, nogil=True, parallel=True)
def draw_rows(logits, keys, temperatures, top_ks, top_ps, banned):
    """Tokens [R] int64 (-1: not finite) and their log-probabilities [R] float32.

    logits [R or more, vocab] float32; keys [R, 2] uint32; temperatures [R] float32; top_ks [R] int64, 0 = off;
    top_ps [R] float64, 1 = off; banned [R, B] int64, unused places -1. The rows are shared out among threads.
    """
    rows = keys.shape[0]
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
    for r in prange(rows):
        tokens[r], logprobs[r] = _draw_row(
            logits[r], keys[r, 0], keys[r, 1], temperatures[r], top_ks[r], top_ps[r], banned[r]
        )
    return tokens, logprobs
