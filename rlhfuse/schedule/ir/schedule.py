"""The order in which every node computes, as a value that prints one line per node and parses back.

    node 0: actor:0F0 critic:1F0 critic:1B0 actor:0B0
    node 1: critic:0F0 actor:1F0 actor:1B0 critic:0B0

The forwards of a stage run in micro-batch order, and so do its backwards. Paper: section 5.2, the matrix S.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.base.errors import ScheduleError
from rlhfuse.schedule.ir.action import Action
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem


@dataclass(frozen=True)
class Schedule:
    """`orders[node]` is everything that node computes, in execution order.

    Raises ScheduleError when an action is missing, repeated, foreign, on a wrong node or out of
    micro-batch order. A cycle between nodes is found by `evaluate`.
    """

    problem: FusionProblem
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        check_orders(build_graph(self.problem), self.orders)

    def text(self) -> str:
        """One line per node; `parse` is the inverse."""
        return grid(dict(enumerate(self.orders)))

    def of_fewer(self, problem: FusionProblem) -> Schedule:
        """The schedule of `problem`, which is this one's with fewer micro-batches: without the last of them.

        What is left out waits for nothing that stays, so that none of the rest comes later or is held longer.
        """
        counts = {pipeline.name: pipeline.microbatches for pipeline in problem.pipelines}
        kept = (tuple(a for a in order if (a.microbatch or 0) < counts[a.pipeline]) for order in self.orders)
        return Schedule(problem, tuple(kept))

    @staticmethod
    def parse(problem: FusionProblem, text: str) -> Schedule:
        """Read what `text` wrote. Raises InputError on a malformed line, ScheduleError on a broken rule."""
        orders: list[tuple[Action, ...]] = []
        for line in filter(str.strip, text.splitlines()):
            match = re.fullmatch(r"\s*node (\d+):(.*)", line)
            if not match or int(match[1]) != len(orders):
                raise ScheduleError(f"line {line.strip()!r} must begin with 'node {len(orders)}:'")
            orders.append(tuple(Action.parse(word) for word in match[2].split()))
        return Schedule(problem, tuple(orders))


def grid(rows: Mapping[int, Sequence[object]], mark: tuple[int, int] | None = None, name: str = "node") -> str:
    """One line for each of the numbered rows; the entry at `mark` = (row, position) is pointed out."""
    lines = []
    for row, entries in rows.items():
        words = [*map(str, entries)]
        if mark and mark[0] == row:
            words.insert(mark[1] + 1, "<-- ERROR HERE")
        lines.append(f"{name} {row}: {' '.join(words)}".rstrip())
    return "\n".join(lines)


def check_orders(graph: OperationGraph, orders: tuple[tuple[Action, ...], ...]) -> None:
    """Raise ScheduleError, with the grid, unless `orders` holds each action once, in place and in order."""
    nodes, rows = graph.problem.nodes, dict(enumerate(orders))
    if len(orders) != nodes:
        raise ScheduleError(f"the schedule has {len(orders)} nodes, its problem has {nodes}")
    done, node_of, lane_of = [0] * len(graph.lanes), graph.node.tolist(), graph.lane.tolist()
    for node, order in enumerate(orders):
        for position, action in enumerate(order):
            mark = (node, position)
            operation = graph.number.get(action)
            if operation is None:
                raise ScheduleError(f"node {node}: {action} is not in the problem", grid(rows, mark))
            if (home := node_of[operation]) != node:
                raise ScheduleError(f"node {node}: {action} belongs on node {home}", grid(rows, mark))
            lane = lane_of[operation]
            if action.microbatch != done[lane]:
                raise ScheduleError(
                    f"node {node}: {action} is out of micro-batch order; {done[lane]} is next", grid(rows, mark)
                )
            done[lane] += 1
    for count, lane in zip(done, graph.lanes):
        if count != lane.microbatches:
            missing = graph.actions[lane.first + count]
            raise ScheduleError(f"node {lane.node}: {missing} is missing", grid(rows))
