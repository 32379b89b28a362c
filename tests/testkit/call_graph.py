"""When the calls of an iteration run, each on its mesh (REAL, appendix C, Algorithm 1)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.base.errors import InputError


@dataclass(frozen=True)
class GraphCall:
    """A node of the graph: `mesh` is the first and last rank, or machine, that it runs on, both included."""

    name: str
    mesh: tuple[int, int]
    seconds: float
    parents: tuple[str, ...] = ()

    def overlaps(self, other: GraphCall) -> bool:
        return self.mesh[0] <= other.mesh[1] and other.mesh[0] <= self.mesh[1]


def graph_seconds(calls: Sequence[GraphCall]) -> float:
    """The end of the last call."""
    return max(end for _, end in place_calls(calls).values())


def place_calls(calls: Sequence[GraphCall]) -> dict[str, tuple[float, float]]:
    """Start and end of every call, by name: those that are ready first go first, of equal ones the first in `calls`.

    Raises InputError for calls that wait for one another.
    """
    by_name = {call.name: call for call in calls}
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
