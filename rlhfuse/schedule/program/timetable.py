"""When everything in a schedule ends, in one total order, and when its nodes can be stopped for free.

An event that several nodes attend together (a collective) is a barrier for them. It costs nothing at a time t when
each of them is idle, between two actions, or in an action that may begin at t or later without making the schedule
longer: its *latest start*. So the collective goes to the first such time, not simply to the time it is ready: by
then another model's action may be under way, and whoever waits in the collective could not start its next one.

Knows nothing of ranks or of what the collectives are: lowering.py asks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import cached_property

from rlhfuse.schedule.ir.action import Action
from rlhfuse.schedule.ir.evaluate import TOLERANCE, end_times
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.schedule import Schedule


class Timetable:
    """Ends and latest starts of all actions of `schedule`. Raises ScheduleError naming the cycle of a deadlock."""

    def __init__(self, schedule: Schedule) -> None:
        self._graph = graph = build_graph(schedule.problem)
        self._orders = [[graph.number[action] for action in order] for order in schedule.orders]
        self._ends = end_times(graph, self._orders)
        self._following: list[list[int]] = [[o for o in pair if o >= 0] for pair in graph.downstream.tolist()]
        for order in self._orders:
            for before, after in zip(order, order[1:]):
                self._following[before].append(after)

    def actions(self) -> Iterator[tuple[float, Action]]:
        """(end, action) by (end, node), each after what it depends on and after what is before it on its node."""
        for operation in self._total_order:
            yield self._ends[operation], self._graph.actions[operation]

    def free(self, time: float, nodes: Iterable[int]) -> float:
        """The first time from `time` on, the makespan at the latest, when `nodes` may all stop at no cost."""
        closed = [(late, end) for node in nodes for late, end in self._closed[node] if end > time]
        slip = TOLERANCE * max(self._ends)
        for late, end in sorted(closed):
            if late + slip < time < end - slip:
                time = end
        return time

    @cached_property
    def _total_order(self) -> list[int]:
        """Ends alone would do, but equal ends (after rounding) must not turn a dependency round."""
        node, ends = self._graph.node.tolist(), self._ends
        waits = [0] * self._graph.size
        for targets in self._following:
            for target in targets:
                waits[target] += 1
        heap = [(ends[o], node[o], o) for o in range(self._graph.size) if not waits[o]]
        heapq.heapify(heap)
        order = []
        while heap:
            operation = heapq.heappop(heap)[2]
            order.append(operation)
            for target in self._following[operation]:
                waits[target] -= 1
                if not waits[target]:
                    heapq.heappush(heap, (ends[target], node[target], target))
        return order

    @cached_property
    def _closed(self) -> list[list[tuple[float, float]]]:
        """Per node the times (latest start, end) of its actions when stopping it would delay the schedule."""
        graph, node = self._graph, self._graph.node.tolist()
        duration, lag, downstream = graph.duration.tolist(), graph.lag.tolist(), graph.downstream.tolist()
        makespan, latest = max(self._ends), [0.0] * graph.size
        closed: list[list[tuple[float, float]]] = [[] for _ in self._orders]
        for operation in reversed(self._total_order):
            late = makespan
            for target in self._following[operation]:
                late = min(late, latest[target] - (lag[target] if target in downstream[operation] else 0.0))
            latest[operation] = late - duration[operation]
            if latest[operation] < self._ends[operation]:
                closed[node[operation]].append((latest[operation], self._ends[operation]))
        return closed
