"""Simulated annealing over node orders, in numba: the inner loop of the search (paper: section 5.2, Algorithms 1-3).

One operation moves up to LONGEST places on its node. Moved are critical operations adjacent in time to the neighbour
that they pass (only such moves can shorten the schedule; the job-shop N1 and N6 neighbourhoods), and a small share of
others. A move is priced over its segment before the state is touched. Memory is a penalty per position above the cap;
with a pull, operations on any path longer than the target count as critical, and what shortens theirs is worth a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.schedule.search.heads_tails import LONGEST, State, Tables, makespan_of, place, refresh

LONG_SHARE = 0.6  # of the moves bridge two places or more
LONGER = 0.7  # of those that bridge k places, this share goes on to k + 1


class Rule(NamedTuple):
    """How to anneal: times in the problem's unit, `cap` in its memory unit per node."""

    cap: np.ndarray
    penalty: float  # time charged per position above the cap
    free_share: float  # share of tried moves that need not be critical
    target: float  # fast enough: stop at such a schedule within the caps; being slower costs only above it
    epsilon: float  # times closer than this are equal; below every duration
    pull: float  # charged per operation and time that the longest path through it is above the target


@njit(cache=True)
def uniform(random: np.ndarray) -> float:
    """The next number in [0, 1) of a xorshift64* stream."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.float64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True)
def anneal(t: Tables, s: State, rule: Rule, moves: int, warm: float, cold: float, best: np.ndarray, fastest: float):
    """Try `moves` moves while the temperature goes from `warm` to `cold`, geometrically.

    `best` receives the sequence of any schedule within the caps that is faster than `fastest`. Returns (moves tried,
    moves accepted, makespan of `best` or `fastest`, positions above the cap now). Stops at `rule.target`.
    """
    refresh(t, s)
    makespan = makespan_of(t, s)
    above, accepted = 0, 0
    for i in range(len(s.sequence)):
        above += s.level[i] > rule.cap[t.node[s.sequence[i]]]
    temperature, move = warm, 0
    while move < moves:
        if above == 0 and makespan < fastest - rule.epsilon:
            fastest = makespan
            for i in range(len(best)):
                best[i] = s.sequence[i]
            if fastest <= rule.target + rule.epsilon:
                return move, accepted, fastest, above
        temperature = warm * (cold / warm) ** (move / moves)
        # Up to 64 moves at one temperature, or to the first that is accepted.
        tried, low, high, more = _propose(t, s, rule, makespan, temperature, min(64 - move % 64, moves - move))
        move += tried
        if high > low:
            place(t, s, low, high)
            accepted += 1
            above += more
            makespan = makespan_of(t, s)
    if above == 0 and makespan < fastest - rule.epsilon:
        fastest = makespan
        for i in range(len(best)):
            best[i] = s.sequence[i]
    return moves, accepted, fastest, above


@njit(cache=True)
def _propose(t: Tables, s: State, rule: Rule, makespan: float, temperature: float, moves: int):
    """Draw moves until one is accepted, at most `moves`: its new order, levels and places go into `s`.

    Returns (moves drawn, first and last position of the segment, how many more of its positions are above
    the cap); the positions are both 0 when none was accepted. Written in one piece over plain arrays: nearly
    all moves end in here, and every call with the tuples costs as much as such a move.
    """
    node_of, lane_of, duration, upstream = t.node, t.lane, t.duration, t.upstream
    lag, downstream, memory, first = t.lag, t.downstream, t.memory, t.first
    sequence, head, tail, level, segment = s.sequence, s.head, s.tail, s.level, s.segment
    new_head, new_tail, new_level, random, caps = s.new_head, s.new_tail, s.new_level, s.random, rule.cap
    epsilon, free_share, pull, fast_enough = rule.epsilon, rule.free_share, rule.pull, rule.target
    critical = min(makespan - epsilon, fast_enough + epsilon) if pull > 0 else makespan - epsilon
    n = len(sequence)
    for move in range(moves):
        # 1. The operation, and how many places it goes: negative to the left.
        i = int(uniform(random) * n)
        reach = 1
        if uniform(random) < LONG_SHARE:
            reach = 2
            while reach < LONGEST and uniform(random) < LONGER:
                reach += 1
            if uniform(random) < 0.5:
                reach = -reach
        o = sequence[i]
        node, j = node_of[o], i + reach
        if j < first[node] or j >= first[node + 1]:
            continue
        # 2. Critical and adjacent in time to the neighbour that it passes, or one of the free moves.
        a, b = (o, sequence[i + 1]) if reach > 0 else (sequence[i - 1], o)
        tight = head[b] <= head[a] + duration[a] + epsilon
        wanted = tight and head[a] + duration[a] + tail[a] >= critical and head[b] + duration[b] + tail[b] >= critical
        if not wanted and uniform(random) >= free_share:
            continue
        # 3. The new order of positions low..high, if nothing in it is passed by what it needs. No cycle is closed: b
        # goes before a only if b's upstream starts before all that a feeds; two tight neighbours have no other path.
        low, high = min(i, j), max(i, j)
        length = high - low + 1
        possible = True
        for k in range(length - 1):
            x = sequence[i + 1 + k] if reach > 0 else sequence[j + k]
            segment[k if reach > 0 else k + 1] = x
            a, b = (o, x) if reach > 0 else (x, o)
            source = upstream[b]
            if lane_of[a] == lane_of[b] or source == a:
                possible = False
                break
            if source >= 0 and not (tight and reach == 1):
                for d in range(2):
                    target = downstream[a, d]
                    if target >= 0 and head[source] >= head[target]:
                        possible = False
                if not possible:
                    break
        if not possible:
            continue
        segment[length - 1 if reach > 0 else 0] = o
        # 4. Memory: what its positions hold now.
        held = level[low - 1] if low > first[node] else 0.0
        cap, more = caps[node], 0
        for k in range(length):
            held += memory[segment[k]]
            new_level[k] = held
            more += int(held > cap) - int(level[low + k] > cap)
        # 5. Accepted with probability exp(-cost / temperature): drawn first, so that pricing can stop early.
        afford = -temperature * np.log(1.0 - uniform(random)) - rule.penalty * more
        if pull > 0:
            for k in range(low, high + 1):
                a = sequence[k]
                afford += pull * max(0.0, head[a] + duration[a] + tail[a] - fast_enough)
        if afford < 0:
            continue
        longest = max(makespan, fast_enough)
        limit = longest + afford
        # 6. The longest path through the segment.
        ready, behind = 0.0, 0.0
        if low > first[node]:
            a = sequence[low - 1]
            ready = head[a] + duration[a]
        for k in range(length):
            a = segment[k]
            source = upstream[a]
            if source >= 0:
                ready = max(ready, head[source] + duration[source] + lag[a])
            new_head[k] = ready
            ready += duration[a]
            out = 0.0
            for d in range(2):
                target = downstream[a, d]
                if target >= 0:
                    out = max(out, lag[target] + duration[target] + tail[target])
            new_tail[k] = out
            if ready + out > limit:
                possible = False
                break
        if not possible:
            continue
        if high + 1 < first[node + 1]:
            a = sequence[high + 1]
            behind = duration[a] + tail[a]
        for k in range(length - 1, -1, -1):
            behind = max(behind, new_tail[k]) + duration[segment[k]]
            path = new_head[k] + behind
            longest, limit = max(longest, path), limit - pull * max(0.0, path - fast_enough)
            if longest > limit:
                possible = False
                break
        if possible:
            return move + 1, low, high, more
    return moves, 0, 0, 0
