"""From a schedule of half the nodes and half the micro-batches to one of all.

Folded, two stages in a row become one of both their times, two nodes one, two micro-batches one: an operation stands
for four, and the makespan stays nearly what it was. Unfolded, every operation aims at its quarter of the one that stood
for it; a list scheduler follows these aims, a little early where it can (dispatch.py), and annealing does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import over_cap
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.heads_tails import new_state, refresh
from rlhfuse.schedule.search.solution import Solution

SKEWS = (0.25, 0.5)  # of the folded operation's time: how far its two stages lie from the middle of it
EARLY = (0.0, 0.005, 0.02, 0.05, 0.1)  # of the makespan: how long before its aim an operation may begin


def folded_problem(problem: FusionProblem) -> FusionProblem | None:
    """The problem with stages 2k and 2k + 1 merged; None where that does not pair the nodes, or breaks a memory cap."""
    number = _pairs(problem)
    if number is None:
        return None
    caps = tuple(min(problem.node_cap(n) for n in number if number[n] == k) for k in range(problem.nodes // 2))
    folded = replace(
        problem,
        nodes=problem.nodes // 2,
        pipelines=tuple(_folded(pipeline, number) for pipeline in problem.pipelines),
        transfer=2 * problem.transfer,
        memory_cap=None if problem.memory_cap is None else caps,
        static_memory=0,
    )
    return folded if over_cap(folded, min_memory(folded)) is None else None


def _pairs(problem: FusionProblem) -> dict[int, int] | None:
    """The number of the pair that each node is in."""
    partner: dict[int, int] = {}
    for pipeline in problem.pipelines:
        if pipeline.stages % 2:
            return None
        for a, b in zip(pipeline.placement[::2], pipeline.placement[1::2]):
            if a == b or partner.setdefault(a, b) != b or partner.setdefault(b, a) != a:
                return None
    if len(partner) < problem.nodes:
        return None
    lower = sorted(node for node, other in partner.items() if node < other)
    return {node: lower.index(min(node, partner[node])) for node in partner}


def _folded(pipeline: Pipeline, number: dict[int, int]) -> Pipeline:
    def both(times: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(a + b for a, b in zip(times[::2], times[1::2]))

    def fuller(memory: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(2 * max(pair) for pair in zip(memory[::2], memory[1::2]))

    placement = tuple(number[node] for node in pipeline.placement[::2])
    return pipeline.with_facts(both, fuller, placement=placement, microbatches=(pipeline.microbatches + 1) // 2)


class Unfolder:
    """Makes solutions of `large` from those of `small`, which is `large` folded."""

    def __init__(self, small: OperationGraph, dispatcher: Dispatcher) -> None:
        self.small, self.dispatcher = small, dispatcher
        self.work = len(SKEWS) * len(EARLY) * dispatcher.graph.size  # operations placed by one extension
        numbers = {(lane.pipeline, lane.stage, lane.kind): k for k, lane in enumerate(small.lanes)}
        self.lanes = [(lane, numbers[lane.pipeline, lane.stage // 2, lane.kind]) for lane in dispatcher.graph.lanes]

    def extend(self, solution: Solution, better: Callable[[Solution], bool]) -> tuple[Solution | None, Solution]:
        """Returns the best try that is `better` (or None), and the fastest of all."""
        state = new_state(solution.sequence, 1)
        refresh(self.small.tables, state)
        tries = [
            self.dispatcher.follow(aim, early * solution.makespan)
            for aim in (self._aim(state.head, skew) for skew in SKEWS)
            for early in EARLY
        ]
        return min(filter(better, tries), key=lambda s: s[:2], default=None), min(tries, key=lambda s: s[:2])

    def _aim(self, starts: np.ndarray, skew: float) -> np.ndarray:
        """float64[operations]: when each is to start, if `starts` are those of the folded ones."""
        graph = self.dispatcher.graph
        aim = np.empty(graph.size)
        for lane, number in self.lanes:
            first = self.small.lanes[number].first
            long, short = self.small.duration[first], graph.duration[lane.first]
            microbatch = np.arange(lane.microbatches)
            side = 2 * (lane.stage % 2) - 1 if lane.kind is Kind.F else 1 - 2 * (lane.stage % 2)
            if lane.kind is Kind.W:  # it waits for its own stage alone
                side = 0
            middle = starts[first + microbatch // 2] + long / 2 + side * skew * long
            aim[lane.first + microbatch] = middle + (microbatch % 2 - 0.5) * long / 2 - short / 2
        return aim
