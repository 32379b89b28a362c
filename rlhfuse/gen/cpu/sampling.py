"""The draw of gen/sampler.py on CPU: a numba kernel, each row by itself in a fixed order, exact and without sorting it.

Sums run over CHUNK lanes in float64; the best token is kept for each lane, and the lanes are compared at the end.
Several threads take several rows, so bits do not depend on them.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from torch import Tensor

from rlhfuse.gen.core.draws import DrawBatch, Draws
from rlhfuse.models.cpu.elementwise import F32, exp32, log32, neg_log_one_minus
from rlhfuse.models.cpu.tiles import share_threads

CHUNK = 64  # tokens read at a time, one short loop for each formula, so that LLVM vectorises every loop
BINS = 1024
FARTHEST = F32(60.0)  # below the highest logit all noises are looked at: exp() of what is far below it is 0
_WIDEST = F32(32.0)  # tokens less likely than exp(-32) of the best share the last bin
_NARROWEST = F32(1e-6)
_U32 = np.uint32
_U64 = np.uint64


@njit(forceinline=True)
def mix64(h):
    """What a round of splitmix64 makes of its state: uint64."""
    h = (h ^ (h >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> _U64(27))) * _U64(0x94D049BB133111EB)
    return h ^ (h >> _U64(31))


@njit(forceinline=True)
def noise_key(stream, position):
    """Two 32-bit numbers for each (stream, position): one round of splitmix64."""
    state = mix64((stream ^ _U64(position)) + _U64(0x9E3779B97F4A7C15))
    return _U32(state), _U32(state >> _U64(32))


@njit(cache=True, nogil=True)
def noise_keys(streams, positions):
    """`noise_key` of each: [R, 2] uint32. streams [R] uint64, positions [R] int64."""
    keys = np.empty((streams.shape[0], 2), np.uint32)
    for r in range(streams.shape[0]):
        keys[r, 0], keys[r, 1] = noise_key(streams[r], positions[r])
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


@njit(forceinline=True)
def _chunks(row):
    """`row` as [whole chunks, CHUNK], and what is left: loops of a constant length become vector code."""
    whole = row.shape[0] // CHUNK
    return row[: whole * CHUNK].reshape(whole, CHUNK), row[whole * CHUNK :]


@njit
def _highest(row):
    """max(row), or NaN if the row holds one."""
    lanes = np.full(CHUNK, -np.inf, np.float32)
    chunks, rest = _chunks(row)
    for c in range(chunks.shape[0]):
        for j in range(CHUNK):
            lanes[j] = chunks[c, j] if chunks[c, j] > lanes[j] or chunks[c, j] != chunks[c, j] else lanes[j]
    for j in range(rest.shape[0]):
        lanes[j] = rest[j] if rest[j] > lanes[j] or rest[j] != rest[j] else lanes[j]
    highest = lanes[0]
    for j in range(1, CHUNK):
        highest = lanes[j] if lanes[j] > highest or lanes[j] != lanes[j] else highest
    return highest


@njit
def _partition(row, temperature, highest, weights):
    """exp(row / temperature - highest) into `weights`, and their sum."""
    for i in range(row.shape[0]):
        weights[i] = exp32(row[i] / temperature - highest)
    lanes = np.zeros(CHUNK, np.float64)
    chunks, rest = _chunks(weights)
    for c in range(chunks.shape[0]):
        for j in range(CHUNK):
            lanes[j] += np.float64(chunks[c, j])
    for j in range(rest.shape[0]):
        lanes[j] += np.float64(rest[j])
    total = 0.0
    for j in range(CHUNK):
        total += lanes[j]
    return total


@njit
def _mean_below(row, temperature, highest, weights, total):
    """The mean of row / temperature - highest, by `weights` that sum up to `total`."""
    lanes = np.zeros(CHUNK, np.float64)
    for i in range(row.shape[0]):
        below = row[i] / temperature - highest
        lanes[i % CHUNK] += np.float64(weights[i] * below) if weights[i] > 0 else 0.0
    moment = 0.0
    for j in range(CHUNK):
        moment += lanes[j]
    return moment / total


@njit
def _score(row, temperature, cutoff, hashes, scores):
    """Scores of a chunk's tokens, row / temperature + noise; minus infinity below the cutoff."""
    for j in range(row.shape[0]):
        scores[j] = exponential(hashes[j])
    for j in range(row.shape[0]):
        score = row[j] / temperature - log32(scores[j])
        scores[j] = score if row[j] >= cutoff else F32(-np.inf)


@njit(forceinline=True)
def _within(weights, width, start, key0, key1, reach, hashes):
    """The tokens' hashes, and how many may have a noise that lifts them far enough."""
    within = np.int32(0)
    for j in range(width):
        h = noise_hash(key0, key1, start + j)
        hashes[j] = h
        within += np.int32(F32(h) * F32(2.0**-32) <= weights[j] * reach)
    return within


@njit
def _sampled_token(row, weights, highest, key0, key1, temperature, cutoff):
    """The token of the highest score, the first of equal ones; -1 if all are minus infinity.

    A score is x - log(e) with e >= u, the hash as a number in (0, 1): a token whose u is above exp(x - best) loses, and
    neither logarithm is taken. A little slack stands for rounding; weights [vocab] are exp(x - highest).
    """
    best, token, reach = F32(-np.inf), -1, F32(0.0)
    hashes, scores = np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.float32)
    chunks, rest = _chunks(weights)
    for c in range(chunks.shape[0] + 1):
        start = np.uint32(c * CHUNK)
        if c < chunks.shape[0]:
            near = _within(chunks[c], CHUNK, start, key0, key1, reach, hashes)
        else:
            near = _within(rest, rest.shape[0], start, key0, key1, reach, hashes)
        if best > highest - FARTHEST and not near:
            continue
        width = min(CHUNK, row.shape[0] - c * CHUNK)
        _score(row[c * CHUNK : c * CHUNK + width], temperature, cutoff, hashes, scores)
        for j in range(width):
            if scores[j] > best:
                best, token = scores[j], c * CHUNK + j
        if best > highest - FARTHEST:
            reach = F32(np.exp(np.float64(highest) - best + 1e-4 + 1e-6 * abs(np.float64(best))))
    return token


@njit
def _first(row, value, start):
    """Where `value` first stands in a row, counted from `start`; -1 if it is minus infinity."""
    for j in range(row.shape[0]):
        if row[j] == value > -np.inf:
            return start + j
    return -1


@njit
def _greedy_token(row):
    """The highest logit's token, the first of equal ones; -1 if all are minus infinity. The row holds no NaN."""
    highest = _highest(row)
    chunks, rest = _chunks(row)
    for c in range(chunks.shape[0]):
        found = np.int32(0)
        for j in range(CHUNK):
            found += np.int32(chunks[c, j] == highest)
        if found:
            return _first(chunks[c], highest, c * CHUNK)
    return _first(rest, highest, row.shape[0] - rest.shape[0])


@njit
def _fill(row, temperature, highest, scale, bins, weights):
    """Each token's bin into `bins` [vocab] uint16, its exp(row / temperature - highest) into `weights` [vocab]."""
    for i in range(row.shape[0]):
        bins[i] = np.uint16(min((highest - row[i] / temperature) * scale, F32(BINS - 1)))
    for i in range(row.shape[0]):
        weights[i] = exp32(row[i] / temperature - highest)


@njit
def _sorted_bin(row, bins, number, count):
    """Logits of the `count` tokens in one bin, the highest first."""
    members = np.empty(count, np.float32)
    at = 0
    for i in range(row.shape[0]):
        if bins[i] == number:
            members[at] = row[i]
            at += 1
    members.sort()
    return members[::-1]


@njit
def row_cutoff(row, temperature, top_k, top_p):
    """Least logit of the `top_k` highest (0: all) whose likelier tokens hold less than `top_p` of their probability.

    Tokens are counted, and their probabilities added, in BINS equal intervals below the highest logit; only the bin in
    which the k-th token, or the p-th part of the probability, lies is sorted. Exponentials are float32, their sums
    float64, in index order within a bin and bin after bin: nothing but the row decides.
    row [vocab] float32 without NaN or infinity, but minus infinity where a token is ruled out; temperature > 0.
    A logit of the row, so that comparing with it is exact; ties with it stay.
    """
    highest = _highest(row)
    if highest == -np.inf:
        return highest
    lowest, highest = -_highest(-row) / temperature, highest / temperature
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
        members = _sorted_bin(row, bins, last, counts[last])[:left]
        if top_p >= 1:
            return members[-1]
        for x in members:
            total += np.float64(exp32(x / temperature - highest))
    number, mass = 0, 0.0
    while number < last and mass + masses[number] < top_p * total:
        mass += masses[number]
        number += 1
    members = _sorted_bin(row, bins, number, counts[number])
    if number == last:
        members = members[:left]
    cutoff = members[0]
    for x in members:
        if mass >= top_p * total:
            break
        cutoff = x
        mass += np.float64(exp32(x / temperature - highest))
    return cutoff


@njit(inline="never")
def _draw_row(row, key0, key1, temperature, top_k, top_p, banned, asked, measures):
    """(token, log-probability, entropy) of one row; (-1, NaN, NaN) if it holds a number that is not finite.

    The log-probability of a greedy row that is not `asked` for is NaN: its exponentials are not taken. The entropy is,
    unless it `measures`.
    """
    unit = temperature if temperature > 0 else F32(1.0)
    highest, log_total, entropy = _highest(row) / unit, np.nan, np.nan
    if not np.isfinite(highest):
        return -1, F32(np.nan), F32(np.nan)
    weights = np.empty(row.shape[0] if asked or temperature > 0 else 0, np.float32)
    if weights.shape[0]:
        total = _partition(row, unit, highest, weights)
        log_total = np.log(total)
        if measures:
            entropy = log_total - _mean_below(row, unit, highest, weights, total)
    allowed = row
    if banned.shape[0] and banned.max() >= 0:
        allowed = row.copy()
        for token in banned:
            if token >= 0:
                allowed[token] = F32(-np.inf)
    cutoff = F32(-np.inf)
    if temperature > 0 and (0 < top_k < row.shape[0] or top_p < 1):
        cutoff = row_cutoff(allowed, temperature, top_k, top_p)
    if temperature > 0:
        token = _sampled_token(allowed, weights, highest, key0, key1, temperature, cutoff)
    else:
        token = _greedy_token(allowed)
    if token < 0:
        return -1, F32(np.nan), F32(np.nan)
    return token, F32(np.float64(row[token] / unit - highest) - log_total), F32(entropy)


@njit(cache=True, nogil=True, parallel=True)
def draw_rows(logits, keys, temperatures, top_ks, top_ps, banned, asked, starts, guesses, measures):
    """Tokens [R] int64 (-1: not finite; -2: not drawn), their log-probabilities and the entropies, [R] float32 each.

    logits [R or more, vocab] float32; keys [R, 2] uint32; temperatures [R] float32; top_ks [R] int64, 0 = off;
    top_ps [R] float64, 1 = off; banned [R, B] int64, unused columns -1; asked [R] bool: for log-probabilities. Row
    starts[i] begins the i-th run, which is drawn up to the first token that is not the guess [R] of its row. Runs are
    shared out among threads. Entropies are NaN unless it `measures`.
    """
    rows, runs = keys.shape[0], starts.shape[0]
    tokens, logprobs = np.full(rows, -2, np.int64), np.full(rows, np.nan, np.float32)
    entropies = np.full(rows, np.nan, np.float32)
    for i in prange(runs):
        end = starts[i + 1] if i + 1 < runs else rows
        for r in range(starts[i], end):
            tokens[r], logprobs[r], entropies[r] = _draw_row(
                logits[r], keys[r, 0], keys[r, 1], temperatures[r], top_ks[r], top_ps[r], banned[r], asked[r], measures
            )
            if tokens[r] != guesses[r]:
                break
    return tokens, logprobs, entropies


def draw_tokens(logits: Tensor, batch: DrawBatch) -> Draws:
    """One draw per row of `batch`; logits [R or more, vocab] float32 on the CPU."""
    if not len(batch.keys):
        return Draws([], [])
    tokens, logprobs, entropies = draw_logits(logits, batch)
    return Draws(tokens.tolist(), logprobs.tolist(), entropies.tolist() if batch.measures else None)


def draw_logits(logits: Tensor, batch: DrawBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [R] int64, log-probabilities and entropies, [R] float32 each; the last NaN unless the batch measures."""
    share_threads()
    # Rows of a wider buffer are copied: the kernel is compiled for rows without gaps, which it reads several times.
    rows = np.ascontiguousarray(logits.numpy())
    guesses, starts = batch.guesses, np.arange(len(batch.keys))
    if guesses is None:
        guesses = np.full(len(batch.keys), -1)
    else:
        starts = np.flatnonzero(np.concatenate(([True], guesses[:-1] < 0)))
    asked = np.ones(len(batch.keys), np.bool_) if batch.asked is None else batch.asked
    parameters = batch.temperatures, batch.top_ks, batch.top_ps, batch.banned, asked
    return draw_rows(rows, batch.keys, *parameters, starts, guesses, batch.measures)
