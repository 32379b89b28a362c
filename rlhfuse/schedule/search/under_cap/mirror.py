"""The problem with time running backwards: the list scheduler fills its schedules from the end.

A forward then stands for a backward and the last micro-batch for the first, and what fits the caps in one direction
does in the other. Which direction leads to better schedules differs from problem to problem.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.search.dispatch import Dispatcher, Rules
from rlhfuse.schedule.search.heads_tails import longest_path
from rlhfuse.schedule.search.solution import Solution


class Mirror:
    """Makes schedules of `graph` from its end; no backward is split."""

    def __init__(self, graph: OperationGraph) -> None:
        pipelines = graph.problem.pipelines
        turned = tuple(replace(p, forward=p.backward, backward=p.forward) for p in pipelines)
        self.graph, self.dispatcher = graph, Dispatcher(build_graph(replace(graph.problem, pipelines=turned)))
        first = {(lane.pipeline, lane.stage, lane.kind): lane.first for lane in graph.lanes}
        self.other = np.empty(graph.size, np.int64)  # the operation that each stands for, and back
        for (pipeline, stage, kind), number in first.items():
            (there,) = (first[key] for key in first if key[:2] == (pipeline, stage) and key[2] is not kind)
            count = pipelines[pipeline].microbatches
            self.other[number : number + count] = np.arange(there + count - 1, there - 1, -1)

    @staticmethod
    def of(graph: OperationGraph) -> Mirror | None:
        """None where a backward is split: in the mirror its parts would stand before one forward."""
        return None if any(pipeline.split for pipeline in graph.problem.pipelines) else Mirror(graph)

    def dispatch(self, rules: Rules, limit: float) -> Solution:
        """As `Dispatcher.dispatch` of the mirrored problem, turned back."""
        made = self.dispatcher.dispatch(rules, limit)
        if made.makespan > limit:
            return made
        first, sequence = self.graph.tables.first, self.other[made.sequence]
        for low, high in zip(first[:-1], first[1:]):
            sequence[low:high] = sequence[low:high][::-1]
        return Solution(longest_path(self.graph.tables, sequence), made.peak_memory, sequence)

    def aims(self, aim: np.ndarray, makespan: float) -> np.ndarray:
        """When the operations of the mirrored problem begin, where those of `graph` begin at `aim`."""
        return (makespan - aim - self.graph.duration)[self.other]
