"""What raises heads and tails of operations, and when they prove that no schedule of makespan X exists, in numba.

The rules are stated and proved in docs/explanation/schedules.md. Arrays are over operations in an order in which
everything follows what it needs, -1 for none. Edge finding: Carlier and Pinson 1989, in the form of Nuijten 1994.
"""

from __future__ import annotations

import numpy as np
from numba import njit

SLACK = 1e-11  # relative; far above the rounding of sums of durations, far below evaluate.TOLERANCE


@njit(cache=True)
def propagate_precedence(heads, tails, duration, upstream, lag, previous, room):
    """Heads forward and tails backward along every link: upstream, previous micro-batch, and the releases that an
    operation waits for where a stage may hold at most K micro-batches (`room`)."""
    for o in range(len(heads)):
        if upstream[o] >= 0:
            heads[o] = max(heads[o], heads[upstream[o]] + duration[upstream[o]] + lag[o])
        if previous[o] >= 0:
            heads[o] = max(heads[o], heads[previous[o]] + duration[previous[o]])
        for release in room[o]:
            if release >= 0:
                heads[o] = max(heads[o], heads[release] + duration[release])
    for o in range(len(tails) - 1, -1, -1):
        behind = tails[o] + duration[o]
        if upstream[o] >= 0:
            tails[upstream[o]] = max(tails[upstream[o]], behind + lag[o])
        if previous[o] >= 0:
            tails[previous[o]] = max(tails[previous[o]], behind)
        for release in room[o]:
            if release >= 0:
                tails[release] = max(tails[release], behind)


@njit(cache=True)
def least_makespan(heads, tails, duration, by_head, by_tail, first):
    """Largest of all windows and of Jackson's preemptive makespan of every node."""
    bound = 0.0
    for o in range(len(heads)):
        bound = max(bound, heads[o] + duration[o] + tails[o])
    leaf = np.empty(len(heads), np.int64)
    for node in range(len(first) - 1):
        low, high = first[node], first[node + 1]
        for i in range(low, high):
            leaf[by_head[i]] = i - low
        bound = max(bound, _jackson(by_tail[low:high], leaf, heads, tails, duration))
    return bound


@njit(cache=True)
def _jackson(by_tail, leaf, heads, tails, duration):
    """Operations enter by falling tail; a tree over their heads keeps the earliest end of all that entered.

    Entry k of the tree has the work of its leaves and the earliest end of it; without any (0, -inf).
    """
    size = 1
    while size < len(by_tail):
        size *= 2
    work, end = np.zeros(2 * size), np.full(2 * size, -np.inf)
    bound = 0.0
    for i in range(len(by_tail) - 1, -1, -1):
        o = by_tail[i]
        k = size + leaf[o]
        work[k], end[k] = duration[o], heads[o] + duration[o]
        while k > 1:
            k //= 2
            work[k] = work[2 * k] + work[2 * k + 1]
            end[k] = max(end[2 * k + 1], end[2 * k] + work[2 * k + 1])
        bound = max(bound, end[1] + tails[o])
    return bound


@njit(cache=True)
def contradiction(
    heads, tails, duration, upstream, lag, previous, room, by_head, by_tail, first, clashes, makespan, passes
):
    """Whether precedence and edge finding, in turn until nothing changes, leave some operation no window."""
    slack = makespan * SLACK
    for _ in range(passes):
        changed = False
        for node in range(len(first) - 1):
            low, high = first[node], first[node + 1]
            forth = edge_finding(by_head[low:high], heads, tails, duration, makespan, slack)
            back = edge_finding(by_tail[low:high], tails, heads, duration, makespan, slack)
            if forth < 0 or back < 0:
                return True
            changed = changed or forth + back > 0
        if not changed:  # the costlier rule waits until the other has nothing left to say
            outcome = resolve_disjunctions(clashes, heads, tails, duration, makespan, slack)
            if outcome <= 0:
                return outcome < 0
        propagate_precedence(heads, tails, duration, upstream, lag, previous, room)
        for o in range(len(heads)):
            if heads[o] + duration[o] + tails[o] > makespan + slack:
                return True
    return False


@njit(cache=True)
def edge_finding(here, heads, tails, duration, makespan, slack):
    """Raise heads by edge finding (Nuijten): -1 when work does not fit, 1 when a head rose, else 0.

    For every latest end, S is the operations that end by it with a head no earlier than a given one,
    walked from the latest head to the earliest and back. `here`, a node's operations, is kept by head.
    """
    _sort(here, heads)
    count = len(here)
    raised, until, longest = np.empty(count), np.empty(count), 0.0
    for i in range(count):
        raised[i] = heads[here[i]]
        longest = max(longest, duration[here[i]])
    for last in range(count):
        end = makespan - tails[here[last]]
        work, after = 0.0, -np.inf
        for i in range(count - 1, -1, -1):
            o = here[i]
            if makespan - tails[o] <= end:
                work += duration[o]
                after = max(after, heads[o] + work)
            until[i] = after  # earliest end of the operations of S with a head from this one on
        if after > end + slack:
            return -1
        if after + longest <= end:
            continue  # no further operation is too much for any part of S
        before = -np.inf
        for i in range(count):
            o = here[i]
            if makespan - tails[o] <= end:
                before = max(before, heads[o] + work)
                work -= duration[o]
            else:
                if heads[o] + work + duration[o] > end + slack:
                    raised[i] = max(raised[i], until[i])
                if before + duration[o] > end + slack:
                    raised[i] = max(raised[i], after)
    rose = 0
    for i in range(count):
        if raised[i] > heads[here[i]] + slack:
            heads[here[i]] = raised[i]
            rose = 1
    return rose


@njit(cache=True)
def _sort(here, heads):
    """By head, in place; by insertion, since few have moved since the last time."""
    for i in range(1, len(here)):
        o, k = here[i], i
        while k > 0 and heads[here[k - 1]] > heads[o]:
            here[k] = here[k - 1]
            k -= 1
        here[k] = o


@njit(cache=True)
def resolve_disjunctions(clashes, heads, tails, duration, makespan, slack):
    """Keep apart what does not fit together: -1 when that cannot be, 1 on a change, else 0.

    clashes, int64[k, 10]: the rows of Windows._clashes.
    """
    changed = 0
    forwards, releases = np.empty(2, np.int64), np.empty(2, np.int64)
    for k in range(len(clashes)):
        forward_a, release_a, step_a, count_a, x, forward_b, release_b, step_b, count_b, y = clashes[k]
        for m in range(count_a - x + 1):
            forwards[0], releases[0] = forward_a + (m + x - 1) * step_a, release_a + m * step_a
            for n in range(count_b - y + 1):
                forwards[1], releases[1] = forward_b + (n + y - 1) * step_b, release_b + n * step_b
                outcome = _one_before_another(releases, forwards, heads, tails, duration, makespan, slack)
                if outcome < 0:
                    return -1
                changed = max(changed, outcome)
    return changed


@njit(cache=True)
def _one_before_another(releases, forwards, heads, tails, duration, makespan, slack):
    """One of the releases precedes one of the forwards; where only one pair can, it does. Outcome as above."""
    possible, before, after = 0, 0, 0
    for r in releases:
        for f in forwards:
            if heads[r] + duration[r] + duration[f] + tails[f] <= makespan + slack:
                possible += 1
                before, after = r, f
        if possible > 1:
            return 0
    if possible == 0:
        return -1
    changed = 0
    if heads[after] < heads[before] + duration[before] - slack:
        heads[after] = heads[before] + duration[before]
        changed = 1
    if tails[before] < tails[after] + duration[after] - slack:
        tails[before] = tails[after] + duration[after]
        changed = 1
    return changed
