"""Cooling runs under a memory cap well below the best: not down step by step, but at once.

A run begins warm, at the fastest schedule made by rule and far above the cap, which costs little; what it ends with is
as a rule leaner than what steps from a fast schedule lead to. The same seed gives the same runs.
"""

from __future__ import annotations

import math

from rlhfuse.schedule.ir.evaluate import TOLERANCE
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.search.annealer import Annealer
from rlhfuse.schedule.search.heads_tails import Tables
from rlhfuse.schedule.search.solution import Objective, Round, Solution

STREAM = 1  # of random numbers, apart from the steps'
SHARES = (0.8, 0.5, 0.3, 0.15, 0.05)  # cap = peak - share (peak - memory bound); the next after a fruitless run
WARM = (0.6, 0.4, 0.8)  # where runs begin, in mean forward times; ...
COOLED = 15  # ... they end at this part
PENALTIES = (0.4, 0.5, 0.3)  # mean forward times charged per position above the cap
RUN_MOVES = 12_000  # per operation, of the first run; doubled after two fruitless ones, up to the next
LONGEST_RUN_MOVES = 96_000


class CappedRun(Annealer):
    """The capped runs of one level; `advance` makes a part of one."""

    def __init__(self, graph: OperationGraph, tables: Tables, objective: Objective, seed: int, number: int = 0) -> None:
        super().__init__(graph, tables, objective, seed, number)
        self.share = 0  # of SHARES
        self.failures = 0  # runs that have ended with nothing since the best last changed
        self.cap = math.inf  # of the present run
        self.length = self.spent = 0  # moves of the present run, and how many are made
        self.found = False  # whether it ended with a solution
        self.beaten = math.inf  # peak of the solution to beat when it began

    @property
    def exhausted(self) -> bool:
        """Whether runs at all shares have failed since the last success."""
        return self.failures >= len(SHARES)

    def advance(self, best: Solution, starts: list[Solution], moves: int) -> Round:
        """Try at most `moves` moves to find a schedule leaner than `best` and, where that is fast enough, as fast."""
        makespan = self.objective.key(best)[0]
        if self.spent >= self.length or best.peak_memory <= self.cap * (1 + 2 * TOLERANCE):
            self._begin(best, starts)
        moves = max(1, min(moves, self.length - self.spent))
        turn = self.number // 2 + self.restarts
        warm = WARM[turn % len(WARM)] * self.unit
        temperatures = [warm * COOLED ** (-done / self.length) for done in (self.spent, self.spent + moves)]
        rule = self.limits(makespan, self.cap, PENALTIES[turn // len(WARM) % len(PENALTIES)])
        done = self.anneal(rule, moves, (temperatures[0], temperatures[1]), makespan * (1 + 4 * TOLERANCE))
        self.spent += done.tried
        if done.solution is not None:
            self.found, self.spent = True, self.length
        return done

    def _begin(self, best: Solution, starts: list[Solution]) -> None:
        """The next run: after a success as far down again, else less far."""
        if self.length and not self.found:
            self.share, self.failures = (self.share + 1) % len(SHARES), self.failures + 1
        if best.peak_memory < self.beaten:
            self.failures = 0
        peak, makespan = best.peak_memory, self.objective.key(best)[0]
        wanted = peak - max(0.0, peak - float(self.objective.memory_bound(makespan))) * SHARES[self.share]
        self.cap, self.beaten, self.found = min(wanted, peak * (1 - 4 * TOLERANCE)), peak, False
        self.length, self.spent = min(LONGEST_RUN_MOVES, RUN_MOVES * 2 ** (self.failures // 2)) * self.graph.size, 0
        self.go_on_from(min([best, *starts], key=lambda start: (start.makespan, -start.peak_memory)), STREAM)
