"""The least logit that top-k and top-p leave of one row: exact, and without sorting the row.

Tokens are counted, and their probabilities added, in BINS equal intervals below the highest logit. Walking down the
bins finds the one in which the k-th token, or the p-th part of the probability, lies; only that bin is sorted.

    bin       0     1      2 ...          a token's bin never rises with its logit,
    tokens    1     0      3              so all of bin 0 are likelier than all of bin 1
    mass     0.6    0    0.3 ...  <- top_p = 0.8 ends in bin 2

Probabilities are float32 exponentials added in float64, in index order within a bin and bin after bin: nothing but
the row itself decides. Knows nothing of torch, of other rows or of the draw.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlhfuse.models.cpu.elementwise import F32, exp32

BINS = 1024
_WIDEST = F32(32.0)  # tokens less likely than exp(-32) of the best share the last bin
_NARROWEST = F32(1e-6)
_LANES = 64


@njit
def _extremes(row):
    """The lowest and the highest logit, lane by lane."""
    low, high = np.full(_LANES, np.inf, np.float32), np.full(_LANES, -np.inf, np.float32)
    for start in range(0, row.shape[0], _LANES):
        for j in range(min(_LANES, row.shape[0] - start)):
            x = row[start + j]
            low[j] = x if x < low[j] else low[j]
            high[j] = x if x > high[j] else high[j]
    return low.min(), high.max()


@njit
def _fill(row, temperature, highest, scale, bins, weights):
    """Each token's bin into `bins` [vocab] uint16, its exp(row / temperature - highest) into `weights` [vocab]."""
    for i in range(row.shape[0]):
        bins[i] = np.uint16(min((highest - row[i] / temperature) * scale, F32(BINS - 1)))
    for i in range(row.shape[0]):
        weights[i] = exp32(row[i] / temperature - highest)


@njit
def _members(row, bins, number, count):
    """Logits of the `count` tokens in one bin, the highest first."""
    found = np.empty(count, np.float32)
    at = 0
    for i in range(row.shape[0]):
        if bins[i] == number:
            found[at] = row[i]
            at += 1
    found.sort()
    return found[::-1]


@njit
def row_threshold(row, temperature, top_k, top_p):
    """Least logit of the `top_k` highest (0: all) whose likelier tokens hold less than `top_p` of their probability.

    row [vocab] float32 without NaN or infinity, but minus infinity where a token is ruled out; temperature > 0.
    A logit of the row, so that comparing with it is exact; ties with it stay.
    """
    lowest, highest = _extremes(row)
    if highest == -np.inf:
        return highest
    lowest, highest = lowest / temperature, highest / temperature
    vocab = row.shape[0]
    left = top_k if 0 < top_k < vocab else vocab  # tokens that top-k leaves, counted down bin by bin
    bins, weights = np.empty(vocab, np.uint16), np.empty(vocab, np.float32)
    counts, masses = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
    scale = F32(BINS) / max(min(highest - lowest, _WIDEST), _NARROWEST)
    _fill(row, temperature, highest, scale, bins, weights)
    for i in range(vocab):
        counts[bins[i]] += 1
        masses[bins[i]] += np.float64(weights[i])
    last, total = 0, 0.0  # the bin of the last token left; probability of all that are left
    while left > counts[last]:
        left -= counts[last]
        total += masses[last]
        last += 1
    if top_p < 1 and left == counts[last]:
        total += masses[last]
    else:
        members = _members(row, bins, last, counts[last])[:left]
        if top_p >= 1:
            return members[-1]
        for x in members:
            total += np.float64(exp32(x / temperature - highest))
    number, mass = 0, 0.0
    while number < last and mass + masses[number] < top_p * total:
        mass += masses[number]
        number += 1
    members = _members(row, bins, number, counts[number])
    if number == last:
        members = members[:left]
    threshold = members[0]
    for x in members:
        if mass >= top_p * total:
            break
        threshold = x
        mass += np.float64(exp32(x / temperature - highest))
    return threshold
