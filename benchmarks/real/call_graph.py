"""When the calls of one iteration run: calls on device meshes, some of which overlap (REAL, Algorithm 1).

A call is ready when its parents have ended, and starts when all devices of its mesh are free of the calls placed
before it. Calls are placed in the order in which they become ready; ties go by the order given.

Readings of the printed algorithm: the queue is sorted by ReadyTime; line "D'.last = v" applies to every mesh that
overlaps v's, and never lets a mesh's last call move to an earlier end. A mesh is a range of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.errors import InputError


@dataclass(frozen=True)
class GraphCall:
    """A node of the graph: `nodes` are the first and last node of its mesh, both included."""

    name: str
    nodes: tuple[int, int]
    seconds: float
    parents: tuple[str, ...] = ()

    def overlaps(self, other: GraphCall) -> bool:
        return self.nodes[0] <= other.nodes[1] and other.nodes[0] <= self.nodes[1]


def graph_seconds(calls: Sequence[GraphCall]) -> float:
    """The end of the last call."""
    return max(end for _, end in place_calls(calls).values())


def place_calls(calls: Sequence[GraphCall]) -> dict[str, tuple[float, float]]:
    """Start and end of every call, by name.

    Raises InputError for a name given twice, a parent that is no call, or a circle.
    """
    by_name = {call.name: call for call in calls}
    if len(by_name) < len(calls):
        raise InputError("two calls of the graph have the same name; names must differ")
    for call in calls:
        for parent in call.parents:
            if parent not in by_name:
                raise InputError(f"call {call.name}: parent {parent!r} is no call of the graph")
    number = {call.name: index for index, call in enumerate(calls)}
    queue = [(0.0, number[call.name]) for call in calls if not call.parents]
    placed: dict[str, tuple[float, float]] = {}
    while queue:
        ready, index = heapq.heappop(queue)
        call = calls[index]
        busy = max((end for name, (_, end) in placed.items() if by_name[name].overlaps(call)), default=0.0)
        start = max(ready, busy)
        placed[call.name] = (start, start + call.seconds)
        for child in calls:
            if call.name in child.parents and all(parent in placed for parent in child.parents):
                heapq.heappush(queue, (max(placed[parent][1] for parent in child.parents), number[child.name]))
    if len(placed) < len(calls):
        waiting = ", ".join(name for name in by_name if name not in placed)
        raise InputError(f"the calls {waiting} wait for one another; a graph has no circle")
    return placed
