"""Cooling runs under a memory cap well below the best: not down step by step, but at once.

A run begins warm, at the fastest schedule made by rule and far above the cap, which costs little; what it ends with is
as a rule leaner than what steps from a fast schedule lead to. The next goes on from there, warm again, under another
cap. The same seed gives the same runs.
"""

from __future__ import annotations

import math

from rlhfuse.schedule.ir.evaluate import TOLERANCE
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.search.annealer import Annealer
from rlhfuse.schedule.search.solution import Objective, Round, Solution

STREAM = 1  # of random numbers, apart from the steps'
SHARES = (0.8, 0.4, 0.2, 0.1, 0.05)  # cap = peak - share (peak - memory bound): more after a success, or else less
FIRST_SHARE = 1
WARM = (0.3, 0.4)  # where runs begin, in mean forward times; ...
COOLED = 15  # ... they end at this part
PENALTY = 0.8  # mean forward times charged per position above the cap
PULL = 0.2  # share of the time charged per operation whose longest path is too long
RUN_MOVES = 6_000  # per operation of a run after a success; doubled after every other, up to the next
LONGEST_RUN_MOVES = 32_000


class CappedRun(Annealer):
    """The capped runs of one level; `advance` makes a part of one."""

    def __init__(self, graph: OperationGraph, objective: Objective, seed: int, number: int = 0) -> None:
        super().__init__(graph, objective, seed, number)
        self.share = FIRST_SHARE
        self.failures = 0  # runs that have ended with nothing since the best last changed
        self.cap = math.inf  # of the present run
        self.runs = 0
        self.found = False  # whether it ended with a solution
        self.beaten = math.inf  # peak of the solution to beat when it began

    @property
    def exhausted(self) -> bool:
        """Whether runs at all shares have failed twice since the last success."""
        return self.failures >= 2 * len(SHARES)

    def advance(self, best: Solution, starts: list[Solution], moves: int) -> Round:
        """Try at most `moves` moves to find a schedule leaner than `best` and, where that is fast enough, as fast."""
        makespan = self.objective.key(best)[0]
        if self.spent >= self.length or best.peak_memory <= self.cap * (1 + 2 * TOLERANCE):
            self._begin(best, starts)
        rule = self.limits(makespan, self.cap, PENALTY)._replace(pull=PULL)
        done = self.go_on(rule, moves, makespan * (1 + 4 * TOLERANCE))
        if done.solution is not None:
            self.found, self.spent = True, self.length
        return done

    def _begin(self, best: Solution, starts: list[Solution]) -> None:
        """The next run: after a success farther down, else less far."""
        if best.peak_memory < self.beaten:
            self.failures = 0
        if self.found:
            self.share = max(0, self.share - 1)
        elif self.length:
            self.share, self.failures = (self.share + 1) % len(SHARES), self.failures + 1
        peak, makespan = best.peak_memory, self.objective.key(best)[0]
        wanted = peak - max(0.0, peak - float(self.objective.memory_bound(makespan))) * SHARES[self.share]
        self.cap, self.beaten, self.found = min(wanted, peak * (1 - 4 * TOLERANCE)), peak, False
        self.length, self.spent = min(LONGEST_RUN_MOVES, RUN_MOVES * 2**self.failures) * self.graph.size, 0
        self.runs += 1
        self.begin = WARM[(self.number // 2 + self.runs) % len(WARM)] * self.unit
        self.end = self.begin / COOLED
        if self.state is None or (self.failures and self.failures % len(SHARES) == 0):
            self.go_on_from(min([best, *starts], key=lambda start: (start.makespan, -start.peak_memory)), STREAM)
