"""Simulated annealing over node orders, in numba: the inner loop of the search.

State: the order of every node, and for every operation its head r (start) and tail q (longest path
after its end), so that r + duration + q is the longest path through it. One move swaps two
neighbours a, b on a node:

    before  p a b s        r'_b = max(end p, arrival b)      q'_a = max(dur s + q_s, out a)
    after   p b a s        r'_a = max(r'_b + dur b, arrival a)   q'_b = max(dur a + q'_a, out b)

The longest path through the pair after the swap is exact, so a worsening move is priced in O(1) and
refused without touching the state; only an accepted move updates heads and tails, in order of the old
ones, as far as they change. Pairs are swapped when both are critical and adjacent in time (only such
swaps can shorten the schedule; the job-shop N1 neighbourhood), and a small share of others. No swap
that could close a cycle is made: a tight pair has no other path between them since times are positive,
and another pair is skipped unless b's upstream starts before everything that a feeds.

Memory is a penalty per position whose activations exceed the node's cap; a swap changes one position.

Knows nothing of problems, MPI or files: arrays in, arrays out. Paper: section 5.2, Algorithms 1-3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Tables(NamedTuple):
    """What does not change while annealing; see `graph.OperationGraph`. `first[node]` is its first position."""

    node: np.ndarray
    lane: np.ndarray
    duration: np.ndarray
    upstream: np.ndarray
    lag: np.ndarray
    downstream: np.ndarray
    memory: np.ndarray
    first: np.ndarray  # int64[nodes + 1]


class State(NamedTuple):
    """What a move changes. `sequence` lists operations by node, then order; `position` is its inverse."""

    sequence: np.ndarray  # int64[n]
    position: np.ndarray  # int64[n]
    head: np.ndarray  # float64[n]
    tail: np.ndarray  # float64[n]
    level: np.ndarray  # float64[n], activation memory after each position
    heap_key: np.ndarray  # float64[n], scratch
    heap_item: np.ndarray  # int64[n], scratch
    queued: np.ndarray  # bool[n], scratch
    random: np.ndarray  # uint64[1], never 0


class Rule(NamedTuple):
    """How to anneal: times in the problem's unit, `cap` in its memory unit per node."""

    cap: np.ndarray
    penalty: float  # time charged per position above the cap
    free_share: float  # share of tried pairs that need not be critical
    target: float  # stop at a schedule within the caps that is this fast
    epsilon: float  # times closer than this are equal; below every duration


def new_state(sequence: np.ndarray, seed: int) -> State:
    """A state that owns a copy of `sequence`; call `refresh` before the first move."""
    n = len(sequence)
    word = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64 or 1
    return State(
        sequence.astype(np.int64),
        np.zeros(n, np.int64),
        *(np.zeros(n) for _ in range(4)),
        np.zeros(n, np.int64),
        np.zeros(n, np.bool_),
        np.array([word], np.uint64),
    )


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
def arrival(t: Tables, s: State, o: int) -> float:
    """When the input of `o` is there."""
    source = t.upstream[o]
    return s.head[source] + t.duration[source] + t.lag[o] if source >= 0 else 0.0


@njit(cache=True)
def outgoing(t: Tables, s: State, o: int) -> float:
    """Longest path from the end of `o` through what it feeds."""
    longest = 0.0
    for k in range(2):
        target = t.downstream[o, k]
        if target >= 0:
            longest = max(longest, t.lag[target] + t.duration[target] + s.tail[target])
    return longest


@njit(cache=True)
def before(t: Tables, s: State, o: int) -> int:
    """The operation before `o` on its node, or -1."""
    i = s.position[o]
    return s.sequence[i - 1] if i > t.first[t.node[o]] else -1


@njit(cache=True)
def after(t: Tables, s: State, o: int) -> int:
    """The operation after `o` on its node, or -1."""
    i = s.position[o] + 1
    return s.sequence[i] if i < t.first[t.node[o] + 1] else -1


@njit(cache=True)
def makespan_of(t: Tables, s: State) -> float:
    """Largest end over the last operations of the nodes."""
    longest = 0.0
    for node in range(len(t.first) - 1):
        if t.first[node] < t.first[node + 1]:
            o = s.sequence[t.first[node + 1] - 1]
            longest = max(longest, s.head[o] + t.duration[o])
    return longest


@njit(cache=True)
def refresh(t: Tables, s: State) -> bool:
    """Compute positions, levels, heads and tails from the sequence. False when it holds a cycle."""
    n = len(s.sequence)
    for i in range(n):
        s.position[s.sequence[i]] = i
    for node in range(len(t.first) - 1):
        level = 0.0
        for i in range(t.first[node], t.first[node + 1]):
            level += t.memory[s.sequence[i]]
            s.level[i] = level
    waits = np.zeros(n, np.int64)
    order = np.empty(n, np.int64)
    ready = 0
    for o in range(n):
        waits[o] = (t.upstream[o] >= 0) + (before(t, s, o) >= 0)
        if waits[o] == 0:
            order[ready] = o
            ready += 1
    done = 0
    while done < ready:
        o = order[done]
        done += 1
        previous = before(t, s, o)
        s.head[o] = arrival(t, s, o)
        if previous >= 0:
            s.head[o] = max(s.head[o], s.head[previous] + t.duration[previous])
        for k in range(3):
            target = t.downstream[o, k] if k < 2 else after(t, s, o)
            if target >= 0:
                waits[target] -= 1
                if waits[target] == 0:
                    order[ready] = target
                    ready += 1
    if done < n:
        return False
    for i in range(n - 1, -1, -1):
        o = order[i]
        following = after(t, s, o)
        s.tail[o] = outgoing(t, s, o)
        if following >= 0:
            s.tail[o] = max(s.tail[o], t.duration[following] + s.tail[following])
    return True


@njit(cache=True)
def _push(s: State, count: int, key: float, item: int) -> int:
    """Insert into the heap of `count` entries (smallest key first) unless queued; returns the new count."""
    if s.queued[item]:
        return count
    s.queued[item] = True
    i = count
    while i > 0:
        parent = (i - 1) >> 1
        if s.heap_key[parent] <= key:
            break
        s.heap_key[i], s.heap_item[i] = s.heap_key[parent], s.heap_item[parent]
        i = parent
    s.heap_key[i], s.heap_item[i] = key, item
    return count + 1


@njit(cache=True)
def _pop(s: State, count: int) -> int:
    """Remove the smallest of `count` entries and return its item."""
    top = s.heap_item[0]
    last = count - 1
    key, item = s.heap_key[last], s.heap_item[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        if child + 1 < last and s.heap_key[child + 1] < s.heap_key[child]:
            child += 1
        if s.heap_key[child] >= key:
            break
        s.heap_key[i], s.heap_item[i] = s.heap_key[child], s.heap_item[child]
        i = child
    s.heap_key[i], s.heap_item[i] = key, item
    s.queued[top] = False
    return top


@njit(cache=True)
def _spread_heads(t: Tables, s: State, b: int, a: int, head_b: float, head_a: float) -> None:
    """Heads after b came before a: every changed operation once, in order of its old head."""
    count = 0
    s.head[b], s.head[a] = head_b, head_a
    for o in (b, a):
        for k in range(2):
            target = t.downstream[o, k]
            if target >= 0:
                count = _push(s, count, s.head[target], target)
    following = after(t, s, a)
    if following >= 0:
        count = _push(s, count, s.head[following], following)
    while count > 0:
        o = _pop(s, count)
        count -= 1
        head = arrival(t, s, o)
        previous = before(t, s, o)
        if previous >= 0:
            head = max(head, s.head[previous] + t.duration[previous])
        if head == s.head[o]:
            continue
        s.head[o] = head
        for k in range(3):
            target = t.downstream[o, k] if k < 2 else after(t, s, o)
            if target >= 0:
                count = _push(s, count, s.head[target], target)


@njit(cache=True)
def _spread_tails(t: Tables, s: State, b: int, a: int, tail_b: float, tail_a: float) -> None:
    """Tails after b came before a: the mirror of `_spread_heads`."""
    count = 0
    s.tail[a], s.tail[b] = tail_a, tail_b
    for o in (a, b):
        source = t.upstream[o]
        if source >= 0:
            count = _push(s, count, s.tail[source], source)
    previous = before(t, s, b)
    if previous >= 0:
        count = _push(s, count, s.tail[previous], previous)
    while count > 0:
        o = _pop(s, count)
        count -= 1
        tail = outgoing(t, s, o)
        following = after(t, s, o)
        if following >= 0:
            tail = max(tail, t.duration[following] + s.tail[following])
        if tail == s.tail[o]:
            continue
        s.tail[o] = tail
        source, previous = t.upstream[o], before(t, s, o)
        if source >= 0:
            count = _push(s, count, s.tail[source], source)
        if previous >= 0:
            count = _push(s, count, s.tail[previous], previous)


@njit(cache=True)
def _may_swap(t: Tables, s: State, rule: Rule, a: int, b: int, makespan: float) -> bool:
    """Whether a, b (neighbours in `sequence`) may trade places; draws a number when they are not critical."""
    if t.node[a] != t.node[b] or t.lane[a] == t.lane[b] or t.upstream[b] == a:
        return False
    tight = s.head[b] <= s.head[a] + t.duration[a] + rule.epsilon
    critical = makespan - rule.epsilon
    if (
        tight
        and s.head[a] + t.duration[a] + s.tail[a] >= critical
        and s.head[b] + t.duration[b] + s.tail[b] >= critical
    ):
        return True
    if uniform(s.random) >= rule.free_share:
        return False
    source = t.upstream[b]
    if tight or source < 0:
        return True
    for k in range(2):
        target = t.downstream[a, k]
        if target >= 0 and s.head[source] >= s.head[target]:
            return False
    return True


@njit(cache=True)
def anneal(t: Tables, s: State, rule: Rule, moves: int, warm: float, cold: float, best: np.ndarray, fastest: float):
    """Try `moves` swaps while the temperature falls from `warm` to `cold`, geometrically.

    `best` receives the sequence of any schedule within the caps that is faster than `fastest`. Returns
    (moves tried, makespan of `best` or `fastest`, positions above the cap now). Stops at `rule.target`.
    """
    refresh(t, s)
    n = len(s.sequence)
    makespan = makespan_of(t, s)
    above = 0
    for i in range(n):
        above += s.level[i] > rule.cap[t.node[s.sequence[i]]]
    temperature = warm
    for move in range(moves):
        if above == 0 and makespan < fastest - rule.epsilon:
            fastest = makespan
            best[:] = s.sequence
            if fastest <= rule.target + rule.epsilon:
                return move, fastest, above
        if move % 64 == 0:
            temperature = warm * (cold / warm) ** (move / moves)
        i = int(uniform(s.random) * (n - 1))
        a, b = s.sequence[i], s.sequence[i + 1]
        if not _may_swap(t, s, rule, a, b, makespan):
            continue
        # The new heads and tails of the pair, and with them the longest path through it.
        previous, following = before(t, s, a), after(t, s, b)
        head_b = arrival(t, s, b)
        if previous >= 0:
            head_b = max(head_b, s.head[previous] + t.duration[previous])
        head_a = max(head_b + t.duration[b], arrival(t, s, a))
        tail_a = outgoing(t, s, a)
        if following >= 0:
            tail_a = max(tail_a, t.duration[following] + s.tail[following])
        tail_b = max(t.duration[a] + tail_a, outgoing(t, s, b))
        through = max(head_b + t.duration[b] + tail_b, head_a + t.duration[a] + tail_a)
        # Memory after the first of the two is all that changes.
        level = s.level[i] - t.memory[a] + t.memory[b]
        cap = rule.cap[t.node[a]]
        more_above = int(level > cap) - int(s.level[i] > cap)
        cost = max(0.0, through - makespan) + rule.penalty * more_above
        if cost > 0 and uniform(s.random) >= np.exp(-cost / temperature):
            continue
        s.sequence[i], s.sequence[i + 1] = b, a
        s.position[b], s.position[a] = i, i + 1
        s.level[i] = level
        above += more_above
        _spread_heads(t, s, b, a, head_b, head_a)
        _spread_tails(t, s, b, a, tail_b, tail_a)
        makespan = makespan_of(t, s)
    if above == 0 and makespan < fastest - rule.epsilon:
        fastest = makespan
        best[:] = s.sequence
    return moves, fastest, above
