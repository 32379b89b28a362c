"""The annealers of one problem and one seed: the state, its limits, and rounds of moves on it."""

from __future__ import annotations

import math

import numpy as np

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.search.anneal import Rule, anneal
from rlhfuse.schedule.search.heads_tails import State, new_state
from rlhfuse.schedule.search.solution import Objective, Round, Solution, node_peaks

FREE_MOVES = 32  # of one sweep over all operations that need not be critical, ...
FREE_SHARE = 0.3  # ... and at most this share


class Annealer:
    """A state and what moves it; `unit`, the mean forward time, is what temperatures and penalties are in."""

    def __init__(self, graph: OperationGraph, objective: Objective, seed: int, number: int = 0) -> None:
        """`number` tells the ranks of one search apart: each begins with other settings and random numbers."""
        self.graph, self.objective, self.seed, self.number = graph, objective, seed, number
        durations = [graph.duration[lane.first] for lane in graph.lanes if lane.kind is Kind.F]
        self.unit = float(np.mean(durations))
        self.caps = np.array([loosen(graph.problem.node_cap(node)) for node in range(graph.problem.nodes)])
        self.state: State | None = None
        self.restarts = 0
        self.begin = self.end = self.unit  # temperatures of the present run
        self.length = self.spent = 0  # moves of the present run, and how many are made

    def go_on_from(self, start: Solution, *stream: int) -> None:
        """Begin at `start`, with random numbers of `stream` and of how often this has been called."""
        self.restarts += 1
        seed = np.random.SeedSequence((self.seed, self.number, self.graph.size, self.restarts, *stream))
        self.state = new_state(start.sequence, int(seed.generate_state(1, np.uint64)[0]))

    def anneal(self, rule: Rule, moves: int, temperatures: tuple[float, float], beat: float) -> Round:
        """So many moves, or fewer up to the rule's target; what is within the caps and faster than `beat`."""
        assert self.state is not None, "it begins with go_on_from"
        sequence = np.empty(self.graph.size, np.int64)
        tried, accepted, makespan, _ = anneal(self.graph.tables, self.state, rule, moves, *temperatures, sequence, beat)
        solution = Solution(makespan, max(node_peaks(self.graph, sequence)), sequence) if makespan < beat else None
        return Round(max(1, tried), solution, accepted)

    def go_on(self, rule: Rule, moves: int, beat: float) -> Round:
        """A part of the present run: at most `moves` moves of what is left of it."""
        moves = max(1, min(moves, self.length - self.spent))
        temperatures = self._temperature(self.spent), self._temperature(self.spent + moves)
        done = self.anneal(rule, moves, temperatures, beat)
        self.spent += done.tried
        return done

    def _temperature(self, done: int) -> float:
        return self.begin * math.exp(math.log(self.end / self.begin) * min(1.0, done / self.length))

    def limits(self, makespan: float, peak: float, penalty: float) -> Rule:
        """As fast as `makespan` with no more memory than `peak`; `penalty` is in mean forward times."""
        return Rule(
            cap=np.minimum(self.caps, loosen(peak)),
            penalty=penalty * self.unit,
            free_share=min(FREE_SHARE, FREE_MOVES / self.graph.size),
            target=makespan,
            epsilon=min(1e-9 * makespan, float(self.graph.duration.min()) / 4),
            pull=0.0,
        )
