"""Heads and tails of all operations under given node orders, kept up to date while operations move, in numba.

Head r is the start of an operation, tail q the longest path after its end: r + duration + q is the longest path through
it. A move takes one operation out and puts it back up to LONGEST places away on its node; heads and tails are updated
as far as they change, in a topological order that is mended with every move. Paper: section 5.2, Algorithm 3.
"""

# An element of an array is a number to numba, and may be an array to the stubs.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.schedule.ir.graph import Tables

LONGEST = 12  # places that one move can bridge


class State(NamedTuple):
    """What a move changes. `sequence` lists operations by node, then order; `position` is its inverse."""

    sequence: np.ndarray  # int64[n]
    position: np.ndarray  # int64[n]
    head: np.ndarray  # float64[n]
    tail: np.ndarray  # float64[n]
    level: np.ndarray  # float64[n], activation memory after each position
    order: np.ndarray  # int64[n], all operations so that each stands after what it needs
    rank: np.ndarray  # int64[n], its inverse
    marked: np.ndarray  # bool[n], scratch, False between moves
    later: np.ndarray  # int64[n], scratch
    segment: np.ndarray  # int64[LONGEST + 1], scratch: operations of a move in their new order
    new_head: np.ndarray  # float64[LONGEST + 1], scratch
    new_tail: np.ndarray  # float64[LONGEST + 1], scratch
    new_level: np.ndarray  # float64[LONGEST + 1], scratch
    random: np.ndarray  # uint64[1], never 0


def new_state(sequence: np.ndarray, seed: int) -> State:
    """A state that owns a copy of `sequence`; call `refresh` before the first move."""
    n = len(sequence)
    word = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64 or 1
    arrays = (
        sequence.astype(np.int64),
        np.zeros(n, np.int64),
        *np.zeros((3, n)),
        *np.zeros((2, n), np.int64),
        np.zeros(n, np.bool_),
        np.zeros(n, np.int64),
        np.zeros(LONGEST + 1, np.int64),
        *np.zeros((3, LONGEST + 1)),
        np.array([word], np.uint64),
    )
    return State(*arrays)


def longest_path(t: Tables, sequence: np.ndarray) -> float:
    """The makespan of a sequence without a cycle."""
    state = new_state(sequence, 1)
    refresh(t, state)
    return float(makespan_of(t, state))


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
    """Compute positions, levels, order, heads and tails from the sequence. False when it holds a cycle."""
    n = len(s.sequence)
    before, after, waits = np.full(n, -1), np.full(n, -1), np.zeros(n, np.int64)
    for node in range(len(t.first) - 1):
        level = 0.0
        for i in range(t.first[node], t.first[node + 1]):
            o = s.sequence[i]
            s.position[o] = i
            level += t.memory[o]
            s.level[i] = level
            if i > t.first[node]:
                before[o], after[s.sequence[i - 1]] = s.sequence[i - 1], o
    ready = 0
    for o in range(n):
        waits[o] = (t.upstream[o] >= 0) + (before[o] >= 0)
        if waits[o] == 0:
            s.order[ready] = o
            ready += 1
    done = 0
    while done < ready:
        o = s.order[done]
        s.rank[o] = done
        done += 1
        source, previous, head = t.upstream[o], before[o], 0.0
        if source >= 0:
            head = s.head[source] + t.duration[source] + t.lag[o]
        if previous >= 0:
            head = max(head, s.head[previous] + t.duration[previous])
        s.head[o] = head
        for k in range(3):
            target = t.downstream[o, k] if k < 2 else after[o]
            if target >= 0:
                waits[target] -= 1
                if waits[target] == 0:
                    s.order[ready] = target
                    ready += 1
    if done < n:
        return False
    for i in range(n - 1, -1, -1):
        o = s.order[i]
        following, tail = after[o], 0.0
        for k in range(2):
            target = t.downstream[o, k]
            if target >= 0:
                tail = max(tail, t.lag[target] + t.duration[target] + s.tail[target])
        if following >= 0:
            tail = max(tail, t.duration[following] + s.tail[following])
        s.tail[o] = tail
    return True


@njit(cache=True)
def _reorder(t: Tables, s: State, root: int, low_rank: int, high_rank: int) -> None:
    """Mend `order` after `root`, which stood first in a segment of these ranks, came to stand behind another.

    Whatever depends on `root` within the ranks moves behind the rest; both parts keep their order.
    """
    order, rank, marked, later, sequence, position = s.order, s.rank, s.marked, s.later, s.sequence, s.position
    upstream, node_of, first = t.upstream, t.node, t.first
    count, free = 0, low_rank
    for r in range(low_rank, high_rank + 1):
        o = order[r]
        source, i = upstream[o], position[o]
        if o == root or (source >= 0 and marked[source]) or (i > first[node_of[o]] and marked[sequence[i - 1]]):
            marked[o] = True
            later[count] = o
            count += 1
        else:
            order[free], rank[o] = o, free
            free += 1
    for k in range(count):
        o = later[k]
        marked[o] = False
        order[free + k], rank[o] = o, free + k


@njit(cache=True)
def _spread_heads(t: Tables, s: State, low: int, high: int) -> None:
    """Heads after the operations at positions low..high changed places: every changed one once, in `order`."""
    order, rank, marked, sequence, position, heads = s.order, s.rank, s.marked, s.sequence, s.position, s.head
    upstream, downstream, node_of, first = t.upstream, t.downstream, t.node, t.first
    duration, lag = t.duration, t.lag
    waiting, r = 0, len(order)
    for i in range(low, min(high + 2, first[node_of[sequence[low]] + 1])):
        o = sequence[i]
        marked[o] = True
        waiting += 1
        r = min(r, rank[o])
    while waiting > 0:
        o = order[r]
        r += 1
        if not marked[o]:
            continue
        marked[o] = False
        waiting -= 1
        source, i, node, head = upstream[o], position[o], node_of[o], 0.0
        if source >= 0:
            head = heads[source] + duration[source] + lag[o]
        if i > first[node]:
            previous = sequence[i - 1]
            head = max(head, heads[previous] + duration[previous])
        if head == heads[o]:
            continue
        heads[o] = head
        if i + 1 < first[node + 1] and not marked[sequence[i + 1]]:
            marked[sequence[i + 1]] = True
            waiting += 1
        for k in range(2):
            target = downstream[o, k]
            if target >= 0 and not marked[target]:
                marked[target] = True
                waiting += 1


@njit(cache=True)
def _spread_tails(t: Tables, s: State, low: int, high: int) -> None:
    """Tails after the operations at positions low..high changed places: the mirror of `_spread_heads`."""
    order, rank, marked, sequence, position, tails = s.order, s.rank, s.marked, s.sequence, s.position, s.tail
    upstream, downstream, node_of, first = t.upstream, t.downstream, t.node, t.first
    duration, lag = t.duration, t.lag
    waiting, r = 0, -1
    for i in range(max(low - 1, first[node_of[sequence[low]]]), high + 1):
        o = sequence[i]
        marked[o] = True
        waiting += 1
        r = max(r, rank[o])
    while waiting > 0:
        o = order[r]
        r -= 1
        if not marked[o]:
            continue
        marked[o] = False
        waiting -= 1
        i, node, tail = position[o], node_of[o], 0.0
        for k in range(2):
            target = downstream[o, k]
            if target >= 0:
                tail = max(tail, lag[target] + duration[target] + tails[target])
        if i + 1 < first[node + 1]:
            following = sequence[i + 1]
            tail = max(tail, duration[following] + tails[following])
        if tail == tails[o]:
            continue
        tails[o] = tail
        if i > first[node] and not marked[sequence[i - 1]]:
            marked[sequence[i - 1]] = True
            waiting += 1
        source = upstream[o]
        if source >= 0 and not marked[source]:
            marked[source] = True
            waiting += 1


@njit(cache=True)
def place(t: Tables, s: State, low: int, high: int) -> None:
    """Make the move that was arranged and priced."""
    root, last = s.sequence[low], s.sequence[high]
    low_rank, high_rank = s.rank[root], s.rank[last]
    for k in range(high - low + 1):
        o = s.segment[k]
        s.sequence[low + k], s.position[o], s.level[low + k] = o, low + k, s.new_level[k]
    _reorder(t, s, root, low_rank, high_rank)
    _spread_heads(t, s, low, high)
    _spread_tails(t, s, low, high)
