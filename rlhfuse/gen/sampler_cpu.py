"""The draw of sampler.py for CPU: one numba kernel, each row by itself in a fixed order.

Rows are read in chunks of CHUNK tokens, so that hash, noise and sum vectorise; only a chunk that holds a new best
is searched. Sums run over CHUNK lanes in float64. Knows nothing of torch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlhfuse.models.cpu_math import F32, exp32, log32, neg_log_one_minus

CHUNK = 64
_U32 = np.uint32


@njit(forceinline=True)
def _mix(h):
    h = _U32(_U32(h ^ (h >> _U32(16))) * _U32(0x7FEB352D))
    h = _U32(_U32(h ^ (h >> _U32(15))) * _U32(0x846CA68B))
    return _U32(h ^ (h >> _U32(16)))


@njit(forceinline=True)
def exponential(key0, key1, index):
    """-log(1 - u) with u the hash of (key, index): float32. Gumbel noise is minus its logarithm."""
    h = _mix(_U32(_U32(index) * _U32(0x9E3779B9)) ^ key0)
    h = _mix(_U32(h + key1))
    u = (F32(h) + F32(0.5)) * F32(2.0**-32)
    return neg_log_one_minus(u if u < F32(1 - 2.0**-24) else F32(1 - 2.0**-24))


@njit(forceinline=True)
def _log_partition(row, temperature, lanes):
    """log sum exp(row / temperature), as the highest row / temperature and the log of the sum relative to it."""
    highest = row[0] / temperature
    for i in range(row.shape[0]):
        x = row[i] / temperature
        highest = x if x > highest or x != x else highest
    for j in range(CHUNK):
        lanes[j] = 0.0
    for start in range(0, row.shape[0], CHUNK):
        for j in range(min(CHUNK, row.shape[0] - start)):
            lanes[j] += np.float64(exp32(row[start + j] / temperature - highest))
    total = 0.0
    for j in range(CHUNK):
        total += lanes[j]
    return highest, np.log(total)


@njit(cache=True, nogil=True)
def draw_rows(logits, keys, temperatures, thresholds, banned):
    """Tokens [R] int64 (-1: not finite) and their log-probabilities [R] float32.

    logits [R or more, vocab] float32; keys [R, 2] uint32; temperatures, thresholds [R] float32; banned [R, B] int64,
    unused places -1.
    """
    rows, vocab = keys.shape[0], logits.shape[1]
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
    scores, lanes = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float64)
    for r in range(rows):
        row, key0, key1 = logits[r], keys[r, 0], keys[r, 1]
        temperature = temperatures[r] if temperatures[r] > 0 else F32(1.0)
        highest, log_total = _log_partition(row, temperature, lanes)
        tokens[r] = -1
        logprobs[r] = F32(np.nan)
        if not (np.isfinite(highest) and np.isfinite(log_total)):
            continue
        best = F32(-np.inf)
        for start in range(0, vocab, CHUNK):
            width = min(CHUNK, vocab - start)
            if temperatures[r] > 0:
                for j in range(width):  # two loops: LLVM vectorises each, but not both in one
                    scores[j] = exponential(key0, key1, start + j)
                for j in range(width):
                    score = row[start + j] / temperature - log32(scores[j])
                    scores[j] = score if row[start + j] >= thresholds[r] else F32(-np.inf)
            else:
                for j in range(width):
                    scores[j] = row[start + j]
            for b in range(banned.shape[1]):
                if start <= banned[r, b] < start + width:
                    scores[banned[r, b] - start] = F32(-np.inf)
            for j in range(width):
                if scores[j] > best:
                    best = scores[j]
                    tokens[r] = start + j
        if tokens[r] >= 0:
            logprobs[r] = F32(np.float64(row[tokens[r]] / temperature - highest) - log_total)
    return tokens, logprobs
