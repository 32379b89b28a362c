"""Earliest start and latest end of every operation: what any schedule by a given time must keep to.

An operation has a *head* (no schedule starts it earlier) and a *tail* (at least this much time follows
its end), so that in a schedule of makespan X it runs within [head, X - tail]. Four rules raise heads
and tails; each follows from what every schedule satisfies, so a window that becomes too short for its
operation, or a node with more work than fits, proves that no schedule of makespan X exists.

    spread    an operation follows its upstream (and the transfer), the same operation of the previous
              micro-batch, and, where a stage may hold at most K micro-batches, the release of micro-batch
              m - K: when forward m starts, 0..m have been forwarded and a prefix of them is released, so
              with m - K still held there would be K + 1.
    overload  any set S of operations of one node takes min head + sum of durations + min tail; the
              largest of these over all S is the makespan of Jackson's preemptive schedule.
    narrow    (edge finding) where S and one operation i more, of the same node, do not fit between the
              earliest head of S + i and the latest end of S, i is the last of them to end: it starts no
              sooner than min head + sum of durations of any subset of S. Mirrored for tails.
    separate  let x activations of one pipeline and y of another not fit on a node together. The first x
              from micro-batch m on are held together from forward m + x - 1 to release m, if at all,
              the others from forward n + y - 1 to release n. Two spans that start before both ends
              overlap, so one of the two releases precedes one of the two forwards; where the windows
              leave one such pair, it is so.

A stage holds at most K = floor(room on its node / activation). Where a pipeline visits a node more than
once, a micro-batch held at the later stage is still held at the earlier one, so that the activations of
the earlier visits count too; not so with a split backward, whose weight gradients may run in any order.

Operations are numbered here on their own, by pipeline, micro-batch and place in the micro-batch's own
chain, which is an order in which everything follows what it needs whatever K is. Knows nothing of
schedules or search.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np
from numba import njit

from rlhfuse.schedule.problem import FusionProblem, Pipeline

MAX_PASSES = 60  # stopping early proves less, never something false
NARROW_SIZE = 512  # the rule takes the square of a node's operations; above this it is left out
SLACK = 1e-11  # relative; far above the rounding of sums of durations, far below evaluate.TOLERANCE


@dataclass(frozen=True)
class Hold:
    """Micro-batch m is held on `node` from the start of operation `forward[m]` to the end of `release[m]`.

    K of them take at least K * `activation`, and one at least `one`: when it comes to the pipeline's last
    stage, every stage before holds it.
    """

    pipeline: int
    node: int
    activation: float
    one: float
    forward: np.ndarray
    release: np.ndarray

    def lane(self) -> tuple[int, int, int, int]:
        """First forward, first release, step from a micro-batch to the next, micro-batches."""
        count = len(self.forward)
        return self.forward[0], self.release[0], (self.forward[-1] - self.forward[0]) // max(1, count - 1), count


@dataclass(frozen=True, eq=False)
class Windows:
    """Arrays over n operations, -1 stands for none; the windows themselves are made for each question.

    duration, lag (transfer from upstream): float64[n]; node, upstream, previous (micro-batch), room (the
    release to wait for): int64[n]; first[k + 1] - first[k]: the number of operations of node k.
    """

    node: np.ndarray
    duration: np.ndarray
    upstream: np.ndarray
    lag: np.ndarray
    previous: np.ndarray
    room: np.ndarray
    first: np.ndarray
    holds: tuple[Hold, ...]
    capacity: tuple[float, ...] | None = None

    @staticmethod
    def of(problem: FusionProblem) -> "Windows":
        """Windows of `problem` with every rule still to be applied and memory not regarded."""
        parts, holds, base = [], [], 0
        for number, pipeline in enumerate(problem.pipelines):
            parts.append(_chains(problem, pipeline, base))
            holds += _holds(number, pipeline, base)
            base += len(parts[-1][0])
        node, duration, lag, upstream, previous = (np.concatenate(column) for column in zip(*parts))
        return Windows(
            node=node,
            duration=duration,
            upstream=upstream,
            lag=lag,
            previous=previous,
            room=np.full(base, -1),
            first=np.concatenate(([0], np.cumsum(np.bincount(node, minlength=problem.nodes)))),
            holds=tuple(holds),
        )

    def within(self, capacity: Sequence[float]) -> "Windows | None":
        """The same with at most `capacity[node]` of activations held; None where one micro-batch does not fit."""
        room = np.full_like(self.room, -1)
        for hold in self.holds:
            most_memory = capacity[hold.node] * (1 + SLACK)
            if hold.one > most_memory:
                return None
            if hold.activation * len(hold.forward) <= most_memory:
                continue
            most = int(most_memory / hold.activation)
            room[hold.forward[most:]] = hold.release[: len(hold.release) - most]
        return replace(self, room=room, capacity=tuple(capacity))

    def least_makespan(self) -> float:
        """The largest lower bound of `spread` and `overload`: no makespan need be supposed for it."""
        heads, tails = self._spread()
        return _least(heads, tails, self.duration, *self._sorted(heads, tails), self.first)

    def excludes(self, makespan: float, together: bool = False) -> bool:
        """Whether the rules prove that no schedule has a makespan of at most `makespan`.

        `together` applies the last rule as well, where there is a capacity; it takes longer.
        """
        heads, tails = self._spread()
        orders = self._sorted(heads, tails)
        if _least(heads, tails, self.duration, *orders, self.first) > makespan * (1 + SLACK):
            return True
        if np.diff(self.first).max() > NARROW_SIZE:
            return False
        links = self.upstream, self.lag, self.previous, self.room
        clashes = self._clashes() if together and self.capacity else np.zeros((0, 10), np.int64)
        return _contradiction(
            heads, tails, self.duration, *links, *orders, self.first, clashes, float(makespan), MAX_PASSES
        )

    def _clashes(self) -> np.ndarray:
        """Per row two pipelines' holds on a node and the least numbers (x, y) of them that do not fit together.

        int64[k, 10]: first forward, first release, step to the next micro-batch, micro-batches and x or y of either.
        """
        rows = []
        for one, other in itertools.combinations(self.holds, 2):
            if one.node != other.node or one.pipeline == other.pipeline or not one.activation or not other.activation:
                continue
            least, space = len(other.forward) + 1, self.capacity[one.node] * (1 + SLACK)
            for x in range(1, len(one.forward) + 1):
                y = max(0, int((space - x * one.activation) // other.activation) + 1)
                if 0 < y < least:
                    rows.append((*one.lane(), x, *other.lane(), y))
                    least = y
        return np.array(rows, np.int64).reshape(-1, 10)

    def _spread(self) -> tuple[np.ndarray, np.ndarray]:
        heads, tails = np.zeros(len(self.node)), np.zeros(len(self.node))
        _spread(heads, tails, self.duration, self.upstream, self.lag, self.previous, self.room)
        return heads, tails

    def _sorted(self, heads: np.ndarray, tails: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The operations node by node, once by head and once by tail, ascending."""
        return np.lexsort((heads, self.node)), np.lexsort((tails, self.node))


def _chains(problem: FusionProblem, pipeline: Pipeline, base: int) -> tuple[np.ndarray, ...]:
    """node, duration, lag, upstream and previous of a pipeline's operations, numbered from `base`.

    One micro-batch is F at stage 0..P-1, B at stage P-1..0, then W at stage 0..P-1 when split.
    """
    stages, count = pipeline.stages, pipeline.microbatches
    placement = np.array(pipeline.placement)
    node = np.concatenate((placement, placement[::-1]))
    duration = np.concatenate((pipeline.forward, pipeline.backward[::-1]))
    upstream = np.arange(-1, 2 * stages - 1)
    lag = np.where(node != np.roll(node, 1), problem.transfer, 0).astype(float)
    if pipeline.weight_gradient is not None:
        node = np.concatenate((node, placement))
        duration = np.concatenate((duration, pipeline.weight_gradient))
        upstream = np.concatenate((upstream, np.arange(2 * stages - 1, stages - 1, -1)))
        lag = np.concatenate((lag, np.zeros(stages)))
    lag[0] = 0
    length = len(node)
    start = base + length * np.repeat(np.arange(count), length)
    upstream = np.tile(upstream, count)
    upstream = np.where(upstream >= 0, upstream + start, -1)
    previous = base + np.arange(length * count) - length
    previous[:length] = -1
    return np.tile(node, count), np.tile(duration.astype(float), count), np.tile(lag, count), upstream, previous


def _holds(number: int, pipeline: Pipeline, base: int) -> list[Hold]:
    stages = pipeline.stages
    length = (3 if pipeline.split else 2) * stages
    start = base + length * np.arange(pipeline.microbatches)
    holds = []
    for stage, node in enumerate(pipeline.placement):
        one = float(sum(a for n, a in zip(pipeline.placement[: stage + 1], pipeline.activation) if n == node))
        activation = float(pipeline.activation[stage]) if pipeline.split else one
        release = 2 * stages + stage if pipeline.split else 2 * stages - 1 - stage
        holds.append(Hold(number, node, activation, one, start + stage, start + release))
    return holds


@njit(cache=True)
def _spread(heads, tails, duration, upstream, lag, previous, room):
    """Heads forward and tails backward along every link."""
    for o in range(len(heads)):
        if upstream[o] >= 0:
            heads[o] = max(heads[o], heads[upstream[o]] + duration[upstream[o]] + lag[o])
        if previous[o] >= 0:
            heads[o] = max(heads[o], heads[previous[o]] + duration[previous[o]])
        if room[o] >= 0:
            heads[o] = max(heads[o], heads[room[o]] + duration[room[o]])
    for o in range(len(tails) - 1, -1, -1):
        behind = tails[o] + duration[o]
        if upstream[o] >= 0:
            tails[upstream[o]] = max(tails[upstream[o]], behind + lag[o])
        if previous[o] >= 0:
            tails[previous[o]] = max(tails[previous[o]], behind)
        if room[o] >= 0:
            tails[room[o]] = max(tails[room[o]], behind)


@njit(cache=True)
def _least(heads, tails, duration, by_head, by_tail, first):
    """Largest of all windows and of Jackson's preemptive makespan of every node."""
    bound = 0.0
    for o in range(len(heads)):
        bound = max(bound, heads[o] + duration[o] + tails[o])
    leaf = np.empty(len(heads), np.int64)
    for node in range(len(first) - 1):
        low, high = first[node], first[node + 1]
        for place in range(low, high):
            leaf[by_head[place]] = place - low
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
    for place in range(len(by_tail) - 1, -1, -1):
        o = by_tail[place]
        k = size + leaf[o]
        work[k], end[k] = duration[o], heads[o] + duration[o]
        while k > 1:
            k //= 2
            work[k] = work[2 * k] + work[2 * k + 1]
            end[k] = max(end[2 * k + 1], end[2 * k] + work[2 * k + 1])
        bound = max(bound, end[1] + tails[o])
    return bound


@njit(cache=True)
def _contradiction(
    heads, tails, duration, upstream, lag, previous, room, by_head, by_tail, first, clashes, makespan, passes
):
    """Whether spreading and narrowing, in turn until nothing changes, leave some operation no place."""
    slack = makespan * SLACK
    for _ in range(passes):
        changed = False
        for node in range(len(first) - 1):
            low, high = first[node], first[node + 1]
            forth = _narrow(by_head[low:high], heads, tails, duration, makespan, slack)
            back = _narrow(by_tail[low:high], tails, heads, duration, makespan, slack)
            if forth < 0 or back < 0:
                return True
            changed = changed or forth + back > 0
        if not changed:  # the costlier rule waits until the other has nothing left to say
            outcome = _separate(clashes, heads, tails, duration, makespan, slack)
            if outcome <= 0:
                return outcome < 0
        _spread(heads, tails, duration, upstream, lag, previous, room)
        for o in range(len(heads)):
            if heads[o] + duration[o] + tails[o] > makespan + slack:
                return True
    return False


@njit(cache=True)
def _narrow(here, heads, tails, duration, makespan, slack):
    """Raise heads by edge finding (Nuijten): -1 when work does not fit, 1 when a head rose, else 0.

    For every latest end, S is the operations that end by it with a head no earlier than a given one,
    walked from the latest head to the earliest and back. `here`, a node's operations, is kept by head.
    """
    _sort(here, heads)
    count = len(here)
    raised, until = np.empty(count), np.empty(count)
    for i in range(count):
        raised[i] = heads[here[i]]
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
def _separate(clashes, heads, tails, duration, makespan, slack):
    """Keep apart what does not fit together (see Windows.clashes): -1 when that cannot be, 1 on a change, else 0."""
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
    """One of the releases precedes one of the forwards; where only one pair can, it does. Outcome as of _separate."""
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
