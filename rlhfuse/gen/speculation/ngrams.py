"""Counts of what followed each short suffix, in hash tables and lists, and guesses made of them by numba kernels.

guess = argmax(log p + noise): p interpolates over suffixes of ORDER tokens down to one (absolute discounting), noise is
what the sampler is going to add to its logits. Were p the model's distribution, the guess would be the draw, at any
entropy: a Gumbel coupling (Daliri, Musco, Suresh 2024). A colliding hash makes a worse guess, nothing else.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlhfuse.gen.cpu.sampling import exponential, mix64, noise_hash, noise_key
from rlhfuse.models.cpu.elementwise import F32

ORDER = 4
MARGINS = 6  # classes of how far the guess is in front of the next token, each half as likely again
CELLS = ORDER * MARGINS
# What followed a suffix stands side by side in a list: a step leaves the caches empty, and a line brings 8 tokens.
KEY, TOTAL, KINDS, FIRST = 0, 1, 2, 3  # of a suffix [N, 4] int32: key 0 is free; its list is KINDS long, from FIRST on
PLACE = 1  # in the list, of a pair of suffix and token [M, 2] int32: key 0 is free
TOKEN, COUNT = 0, 1  # of an entry of the lists [M, 2] int32; a list that is full moves to twice its room
DISCOUNT = F32(0.85)  # of each count, for what did not follow yet: shorter suffixes share it
LEAST_GAIN = F32(0.05)  # tokens: guesses that promise less are not looked for
LEAST_REST = F32(0.1)  # probability left for shorter suffixes, below which they are not looked at
MOST_PAIRS = 1024  # looked at for one guess
_U64 = np.uint64
_SEED = _U64(0x9E3779B97F4A7C15)
_PAIR = _U64(0xD6E8FEB86659FD93)


@njit(forceinline=True)
def _key(h):
    return np.int32(np.int64(h >> _U64(33)) | 1)


@njit(forceinline=True)
def _place(table, h):
    """Where the entry of hash h stands, or would stand."""
    mask, key = _U64(table.shape[0] - 1), _key(h)
    at = h & mask
    while table[at, KEY] != 0 and table[at, KEY] != key:
        at = (at + _U64(1)) & mask
    return at


@njit(forceinline=True)
def _append(suffix, token, lists, used):
    """Put a token at the end of a suffix's list, counted 0 times; whether there was room."""
    kinds, first = np.int64(suffix[KINDS]), np.int64(suffix[FIRST])
    if kinds & (kinds - 1) == 0:  # 0, 1, 2, 4: full
        room = max(1, 2 * kinds)
        if used[2] + room > lists.shape[0]:
            return False
        for i in range(kinds):
            lists[used[2] + i, TOKEN], lists[used[2] + i, COUNT] = lists[first + i, TOKEN], lists[first + i, COUNT]
        first = used[2]
        suffix[FIRST] = np.int32(first)
        used[2] += room
    lists[first + kinds, TOKEN], lists[first + kinds, COUNT] = token, 0
    suffix[KINDS] += 1
    return True


@njit(cache=True, nogil=True)
def count(text, start, end, suffixes, pairs, lists, used):
    """Count text[start:end], each token after the up to ORDER tokens before it; returns where room ended, or `end`.

    text [tokens] int32; suffixes [a power of two, 4], pairs [a power of two, 2], both filled to two thirds, and lists
    [L, 2], int32; used [3] int64: of each.
    """
    for i in range(max(start, 1), end):
        if 3 * (used[0] + ORDER) > 2 * suffixes.shape[0] or 3 * (used[1] + ORDER) > 2 * pairs.shape[0]:
            return i
        h = _SEED
        for order in range(min(ORDER, i)):
            h = mix64(h + _U64(text[i - 1 - order]) + _U64(1))
            suffix = suffixes[_place(suffixes, h)]
            if suffix[KEY] == 0:
                suffix[KEY] = _key(h)
                used[0] += 1
            after = mix64(h ^ (_U64(text[i]) * _PAIR))
            pair = pairs[_place(pairs, after)]
            if pair[KEY] == 0:
                place = suffix[KINDS]
                if not _append(suffix, text[i], lists, used):
                    return i
                pair[KEY], pair[PLACE] = _key(after), place
                used[1] += 1
            if pair[PLACE] < suffix[KINDS]:  # or it is another suffix's pair, of the same hash
                lists[suffix[FIRST] + pair[PLACE], COUNT] += 1
                suffix[TOTAL] += 1
    return end


@njit
def _interpolate(text, length, suffixes, lists, p, touched):
    """Probabilities after text[:length] into p [vocab], zeros before; returns their tokens, and the order."""
    where, highest, h = np.empty(ORDER, np.int64), 0, _SEED
    for order in range(min(ORDER, length)):
        h = mix64(h + _U64(text[length - 1 - order]) + _U64(1))
        where[order] = np.int64(_place(suffixes, h))
        if suffixes[where[order], KEY] == 0:
            break
        highest = order + 1
    kept, rest, seen = 0, F32(1), 0
    for order in range(highest, 0, -1):
        suffix = suffixes[where[order - 1]]
        if suffix[TOTAL] == 0:  # all its pairs have the hashes of others
            continue
        scale = rest / F32(suffix[TOTAL])
        first, kinds = np.int64(suffix[FIRST]), min(np.int64(suffix[KINDS]), MOST_PAIRS - seen)
        for pair in range(first, first + kinds):
            token = lists[pair, TOKEN]
            if p[token] == F32(0):
                touched[kept] = token
                kept += 1
            p[token] += scale * (F32(lists[pair, COUNT]) - DISCOUNT)
        seen += kinds
        rest = scale * DISCOUNT * F32(suffix[KINDS])
        if rest < LEAST_REST:
            break
    return touched[:kept], highest


@njit
def _keep_likeliest(p, likely, top_k, top_p):
    """Take out what top-k and top-p would, were p the model's: p becomes 0 there."""
    likeliest = np.sort(p[likely])[::-1]
    if 0 < top_k < len(likely):
        likeliest = likeliest[:top_k]
    cutoff, mass, enough = likeliest[-1], F32(0), F32(top_p) * likeliest.sum()
    if top_p < 1:
        for value in likeliest:
            cutoff = value
            mass += value
            if mass >= enough:
                break
    for token in likely:
        if p[token] < cutoff:
            p[token] = F32(0)


@njit
def _guess(text, length, stream, temperature, top_k, top_p, banned, suffixes, lists, p, touched):
    """(token, cell) that may follow text[:length]; (-1, 0) if nothing is known. p stays all zeros."""
    likely, order = _interpolate(text, length, suffixes, lists, p, touched)
    for token in banned:
        if token >= 0:
            p[token] = F32(0)
    if temperature > 0 and len(likely) and (top_k > 0 or top_p < 1):
        _keep_likeliest(p, likely, top_k, top_p)
    key0, key1 = noise_key(stream, length)
    best, second, guess = F32(np.inf), F32(np.inf), -1
    for token in likely:
        if p[token] > F32(0):
            # argmax(log p + noise) is argmin(e / p) of the exponential e that the noise is made of; e is at least u
            if temperature > 0:
                h = noise_hash(key0, key1, token)
                score = F32(h) * F32(2.0**-32)
                score = exponential(h) / p[token] if score < second * p[token] else F32(np.inf)
            else:
                score = F32(1) / p[token]
            if score < best:
                best, second, guess = score, best, token
            elif score < second:
                second = score
        p[token] = F32(0)
    if guess < 0:
        return -1, 0
    margin, ratio = 0, F32(1.5)
    while margin + 1 < MARGINS and second >= best * ratio:
        margin += 1
        ratio *= F32(2)
    return guess, (order - 1) * MARGINS + margin


@njit(forceinline=True)
def _may_pay(tokens, gain, best, prices):
    """Whether more guesses, none likelier than the next one, can give more than `best` tokens for their price."""
    for price in prices:
        tokens += gain
        if tokens > best * price:
            return True
    return False


@njit(cache=True, nogil=True)
def propose(texts, at, lengths, limits, rows, draws, ends, hopes, prices, tables, room):
    """Guesses for S samples, `rows` in all, each where it is likeliest to be right: those before it have to be, too.

    texts [rows, columns] int32, with room behind; at, lengths, limits [S] int64: row, tokens, most guesses; draws: what
    these need, each [S], as in RunningTable; ends [S, E] end tokens, unused columns -1; hopes [CELLS] float32: how
    often a guess of a class is right; prices [rows + 1] float32: what a step costs with so many guesses. There are as
    many as give most tokens for the price. room: zeros [vocab] float32, [vocab] int32 to work in. Returns counts [S]
    and the guesses' classes [S, most]; the guesses lie in `texts`.
    """
    suffixes, _, lists = tables
    p, touched = room
    streams, temperatures, top_ks, top_ps, least_totals = draws
    samples = at.shape[0]
    counts, cells = np.zeros(samples, np.int64), np.zeros((samples, max(rows, 1)), np.int64)
    chance, gain = np.ones(samples, np.float32), np.zeros(samples, np.float32)
    tokens, first, last = F32(samples), 0, samples
    best, bought, order = tokens / prices[0], 0, np.empty(max(rows, 1), np.int64)
    for placed in range(rows):
        for s in range(first, last):  # at first of all, then of the one that got a guess
            gain[s] = F32(0)
            length, held, text = lengths[s] + counts[s], counts[s], texts[at[s]]
            if held < limits[s]:
                banned = ends[s] if length < least_totals[s] else ends[s, :0]
                facts = streams[s], temperatures[s], top_ks[s], top_ps[s], banned
                token, cell = _guess(text, length, *facts, suffixes, lists, p, touched)
                if token >= 0:
                    text[length], cells[s, held] = token, cell
                    gain[s] = chance[s] * hopes[cell]
        first = np.argmax(gain)
        last = first + 1
        if gain[first] < LEAST_GAIN or not _may_pay(tokens, gain[first], best, prices[placed + 1 :]):
            break
        tokens += gain[first]
        chance[first] = gain[first]
        counts[first] += 1
        order[placed] = first
        if tokens > best * prices[placed + 1]:
            best, bought = tokens / prices[placed + 1], placed + 1
    counts[:] = 0
    for i in range(bought):
        counts[order[i]] += 1
    return counts, cells
