"""The paper's greedy schedule as its authors' program makes it (section 5.2, "a naive solution").

One operation after the other is placed, always the one that can start first (backwards before forwards), but a smaller
model's only where it ends before a larger model's next operation on that node can start. This gives the makespans and
peak memories of all twelve greedy schedules in the authors' repository; `builders.greedy` does not look ahead.
"""

from __future__ import annotations

import heapq
import math

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import pipeline_work

FIRST = (Kind.B, Kind.F, Kind.W)  # of operations that can start at the same time


def paper_greedy(problem: FusionProblem) -> Schedule:
    """The greedy schedule of any problem; several models count by size, the largest first."""
    graph = build_graph(problem)
    placing = _Placing(graph)
    duration, downstream = graph.duration.tolist(), graph.downstream.tolist()
    heap = [(*placing.next_on(node), node) for node in range(problem.nodes)]
    heapq.heapify(heap)
    fresh = {node: entry for *entry, node in heap}  # of the entries of a node only the last counts
    for _ in range(graph.size):
        while True:
            *entry, node = heapq.heappop(heap)
            if fresh[node] == entry:
                break
        start, _, number = entry
        operation = placing.take(number, start + duration[placing.head(number)])
        touched = {node} | {int(graph.node[target]) for target in downstream[operation] if target >= 0}
        for other in sorted(touched):
            fresh[other] = list(placing.next_on(other))
            heapq.heappush(heap, (*fresh[other], other))
    return Schedule(problem, tuple(tuple(order) for order in placing.orders))


class _Placing:
    """The operations placed so far: ends, how far each lane is, when each node is free."""

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        self.size = _sizes(graph.problem)
        self.lanes_on: list[list[int]] = [[] for _ in range(graph.problem.nodes)]
        for number, lane in enumerate(graph.lanes):
            self.lanes_on[lane.node].append(number)
        self.upstream, self.lag, self.duration = graph.upstream.tolist(), graph.lag.tolist(), graph.duration.tolist()
        self.end = [math.inf] * graph.size  # of an operation not placed yet
        self.done = [0] * len(graph.lanes)
        self.free = [0.0] * graph.problem.nodes
        self.orders: list[list] = [[] for _ in range(graph.problem.nodes)]

    def head(self, number: int) -> int:
        """The next operation of a lane."""
        return self.graph.lanes[number].first + self.done[number]

    def next_on(self, node: int) -> tuple[float, int, int]:
        """(start, turn of its kind, lane) of what this node would do next; inf when nothing is known to come."""
        starts = [(self._start(number, node), number) for number in self.lanes_on[node]]
        soonest = [math.inf] * (max(self.size) + 1)  # over models of each size rank
        for start, number in starts:
            rank = self.size[self.graph.lanes[number].pipeline]
            soonest[rank] = min(soonest[rank], start)
        best = (math.inf, 0, -1)
        for start, number in starts:
            lane = self.graph.lanes[number]
            larger = min(soonest[: self.size[lane.pipeline]], default=math.inf)
            if start < math.inf and start + self.duration[self.head(number)] <= larger:
                best = min(best, (start, FIRST.index(lane.kind), number))
        return best

    def take(self, number: int, end: float) -> int:
        """Place the next operation of a lane; returns it."""
        operation, node = self.head(number), self.graph.lanes[number].node
        self.done[number] += 1
        self.end[operation] = self.free[node] = end
        self.orders[node].append(self.graph.actions[operation])
        return operation

    def _start(self, number: int, node: int) -> float:
        if self.done[number] == self.graph.lanes[number].microbatches:
            return math.inf
        operation = self.head(number)
        source = self.upstream[operation]
        return max(self.free[node], self.end[source] + self.lag[operation]) if source >= 0 else self.free[node]


def _sizes(problem: FusionProblem) -> list[int]:
    """Of each pipeline the rank of its model, 0 the largest; equal ones in order of appearance."""
    work = {
        model: max(pipeline_work(pipeline) for pipeline in problem.pipelines if pipeline.model == model)
        for model in problem.models
    }
    ranked = sorted(problem.models, key=lambda model: -work[model])
    return [ranked.index(pipeline.model) for pipeline in problem.pipelines]
