"""Annealing from the best schedule under a tight memory cap: run after run, none warm enough to lose it.

Where hardly a schedule fits, one made under the cap is nearer to a good one than what an annealer comes to from above
it. So every run begins at the best there is, constant at a low temperature or cooling from one.
"""

from __future__ import annotations

import math

from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.search.annealer import Annealer
from rlhfuse.schedule.search.solution import Objective, Round, Solution

TEMPERATURES = (0.1, 0.07, 0.13, 0.3, 0.2)  # mean forward times, run after run; ...
COOLED = 15  # ... two of three end at this part
PENALTY = 1.0  # mean forward times charged per position above the cap
RUN_MOVES = 3_000  # per operation; doubled every other run, up to the next
LONGEST_RUN_MOVES = 25_600


class PolishRun(Annealer):
    """The runs of one level; `advance` makes a part of one."""

    def __init__(self, graph: OperationGraph, objective: Objective, seed: int, number: int = 0) -> None:
        super().__init__(graph, objective, seed, number)
        self.runs = self.length = self.spent = 0
        self.beaten = math.inf  # the makespan to beat when last seen

    def advance(self, best: Solution, moves: int) -> Round:
        """Try at most `moves` moves to find a schedule faster than `best`."""
        if self.spent >= self.length:
            self.length = min(LONGEST_RUN_MOVES, RUN_MOVES * 2 ** (self.runs // 2)) * self.graph.size
            self.spent, self.beaten = 0, math.inf
            self.runs += 1
        if best.makespan < self.beaten:
            self.go_on_from(best)
        moves = max(1, min(moves, self.length - self.spent))
        rule = self.limits(best.makespan, math.inf, PENALTY)._replace(target=float(self.objective.target))
        temperatures = self._temperature(self.spent), self._temperature(self.spent + moves)
        done = self.anneal(rule, moves, temperatures, best.makespan)
        self.spent += done.tried
        self.beaten = best.makespan if done.solution is None else done.solution.makespan
        return done

    def _temperature(self, spent: int) -> float:
        turn = self.runs - 1 + self.number
        cooled = COOLED ** -min(1.0, spent / self.length) if turn % 3 else 1.0
        return TEMPERATURES[turn % len(TEMPERATURES)] * self.unit * cooled
