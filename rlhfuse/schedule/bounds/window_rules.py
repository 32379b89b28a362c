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
    head, end_of, time = np.empty(count), np.empty(count), np.empty(count)  # close together: they are read n^2 times
    for i in range(count):
        o = here[i]
        head[i], end_of[i], time[i] = heads[o], makespan - tails[o], duration[o]
    raised, until, longest = head.copy(), np.empty(count), time.max() if count else 0.0
    for end in np.unique(end_of):
        work, after = 0.0, -np.inf
        for i in range(count - 1, -1, -1):
            if end_of[i] <= end:
                work += time[i]
                after = max(after, head[i] + work)
            until[i] = after  # earliest end of the operations of S with a head from this one on
        if after > end + slack:
            return -1
        if after + longest <= end:
            continue  # no further operation is too much for any part of S
        before = -np.inf
        for i in range(count):
            if end_of[i] <= end:
                before = max(before, head[i] + work)
                work -= time[i]
            else:
                if head[i] + work + time[i] > end + slack:
                    raised[i] = max(raised[i], until[i])
                if before + time[i] > end + slack:
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
    forwards, releases, limit = np.empty(2, np.int64), np.empty(2, np.int64), makespan + slack
    for k in range(len(clashes)):
        forward_a, release_a, step_a, count_a, x, forward_b, release_b, step_b, count_b, y = clashes[k]
        ends_a, rest_a = np.empty(count_a - x + 1), np.empty(count_a - x + 1)
        ends_b, rest_b = np.empty(count_b - y + 1), np.empty(count_b - y + 1)
        stale = True
        for m in range(len(ends_a)):
            for n in range(len(ends_b)):
                if stale:
                    _gather(ends_a, rest_a, release_a, forward_a + (x - 1) * step_a, step_a, heads, tails, duration)
                    _gather(ends_b, rest_b, release_b, forward_b + (y - 1) * step_b, step_b, heads, tails, duration)
                    stale = False
                possible = int(ends_a[m] + rest_a[m] <= limit) + int(ends_a[m] + rest_b[n] <= limit)
                possible += int(ends_b[n] + rest_a[m] <= limit) + int(ends_b[n] + rest_b[n] <= limit)
                if possible > 1:
                    continue
                forwards[0], releases[0] = forward_a + (m + x - 1) * step_a, release_a + m * step_a
                forwards[1], releases[1] = forward_b + (n + y - 1) * step_b, release_b + n * step_b
                outcome = _one_before_another(releases, forwards, heads, tails, duration, makespan, slack)
                if outcome < 0:
                    return -1
                changed, stale = max(changed, outcome), outcome > 0
    return changed


@njit(cache=True)
def _gather(ends, rest, release, forward, step, heads, tails, duration):
    """When the release of every micro-batch ends at the earliest, and what follows the start of the forward."""
    for m in range(len(ends)):
        r, f = release + m * step, forward + m * step
        ends[m], rest[m] = heads[r] + duration[r], duration[f] + tails[f]


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
