"""Annealing of one problem: run after run, until nothing is left to gain.

While the solution to beat is not fast enough, it aims below its makespan: at a constant low temperature first, then in
cooling runs from warmer ones. After that it aims at the same makespan under a memory cap that goes down step by step
from the best (docs/explanation/schedule_search.md says why). The same seed gives the same run. Paper: section 5.2,
"Optimizing memory usage".
"""

from __future__ import annotations

import math

import numpy as np

from rlhfuse.schedule.ir.evaluate import TOLERANCE, reaches
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.search.anneal import Rule
from rlhfuse.schedule.search.annealer import Annealer
from rlhfuse.schedule.search.solution import Key, Objective, Round, Solution

# Temperatures are in mean forward times.
TEMPERATURES = (0.1, 0.07, 0.13)  # constant; the ranks of an MPI job begin with different ones
COOLING = (0.3, 0.6, 0.45)  # where cooling runs begin; they end at a fifteenth
PENALTY = 1.0  # mean forward times charged per position above the cap
CAP_STEPS = (0.3, 0.12, 0.04, 0.0)  # cap = peak - step (peak - memory bound), the next step after fruitless moves
PATIENCE = 3_000  # moves per operation without success before the next step; doubled after the last
RUN_MOVES = 3_000  # per operation, of the first run for latency; doubled every other run, up to the next
LONGEST_RUN_MOVES = 25_600
DRIFT = 30  # moves per operation between two schedules that `find_leaner` reports


class AnnealingRun(Annealer):
    """The annealing of one level; `advance` makes a part of it."""

    def __init__(self, graph: OperationGraph, objective: Objective, seed: int, number: int = 0) -> None:
        super().__init__(graph, objective, seed, number)
        self.aim: tuple[bool | str, Key | float] | None = None  # (improve memory?, key to beat), or ("leaner", peak)
        self.own = False  # whether this run itself has found the solution to beat
        self.step = 0
        self.drift = 0  # moves to make before `find_leaner` may report again
        self.patience = PATIENCE
        self.beaten: Solution | None = None  # the solution to beat when last seen
        self.descent: Solution | None = None  # the best of a descent from another start, while it is on one
        self.failures = 0  # times that all steps from the best have failed

    @property
    def exhausted(self) -> bool:
        """Whether all steps have been tried twice, and another descent between, since the last success."""
        return self.failures >= 2

    @property
    def fruitless(self) -> bool:
        """Whether a step has failed since the last success."""
        return self.failures > 0 or self.step > 0

    def advance(self, best: Solution, starts: list[Solution], moves: int, late: bool = False) -> Round:
        """Try at most `moves` moves to beat `best`. `starts` are solutions to begin a run for latency with.

        With `late`, memory is improved at the makespan there is, fast enough or not.
        """
        if self.beaten is None or self.objective.key(best) != self.objective.key(self.beaten):
            self.beaten, self.failures, self.patience = best, 0, PATIENCE
        late = late and not self.objective.fast_enough(best.makespan)
        if late:
            self.descent = None
        beaten = best if self.descent is None else self.descent
        polish = self.objective.kind == "memory" and (late or self.objective.fast_enough(beaten.makespan))
        key = self.objective.key(beaten)
        if (polish, key) != self.aim:
            self._take_aim(polish, key, beaten, starts)
        elif self.spent >= self.length:
            self._next(best, starts)
            return self.advance(best, starts, moves, late)
        done = self.go_on(self._rule(polish, key), moves, key[0] * (1 + 4 * TOLERANCE) if polish else key[0])
        if done.solution is None:
            return done
        self.own = True
        if self.descent is not None:  # the best is fast enough, or there would be no descent
            self.descent = done.solution
            fast_enough = self.objective.fast_enough(done.solution.makespan)
            if not fast_enough or reaches(best.peak_memory, done.solution.peak_memory):
                return done._replace(solution=None)
            self.descent = None
        return done

    def find_leaner(self, best: Solution, peak: float, moves: int) -> Round:
        """Try at most `moves` moves to find a schedule that is fast enough with less memory than `peak`.

        Never asks for less than `best` has. After each find it drifts on for a while, so that the next is another one.
        """
        aim = ("leaner", peak)
        if self.aim != aim:
            self.aim = aim
            self.drift = 0
            if self.state is None:
                self._restart(best)
        rule = self.limits(self.objective.key(best)[0], max(peak * (1 - 2 * TOLERANCE), best.peak_memory), PENALTY)
        drifting = self.drift > 0
        if drifting:
            moves = min(moves, self.drift)
        beat = -math.inf if drifting else float(self.objective.target) * (1 + 4 * TOLERANCE)
        done = self.anneal(rule, moves, (self.begin, self.begin), beat)
        self.drift = self.drift - done.tried if done.solution is None else DRIFT * self.graph.size
        return done

    def _take_aim(self, polish: bool, key: Key, best: Solution, starts: list[Solution]) -> None:
        """Something better is known than before, or memory is what counts now."""
        was_polish = self.aim is not None and self.aim[0]
        own, self.own = self.own, False
        self.aim = (polish, key)
        if not polish:
            if self.state is None or not own:
                self._begin_run(best, starts)
            return
        self.step, self.spent = 0, 0
        self.length = self.patience * self.graph.size
        if self.state is None or not was_polish or (not own and (self.number + self.restarts) % 2):
            self._restart(best)

    def _next(self, best: Solution, starts: list[Solution]) -> None:
        """The present run or step has found nothing."""
        self.spent = 0
        if self.aim is None or not self.aim[0]:
            if self.descent is None:
                self._begin_run(best, starts)
            else:
                self._turn_back(best, starts)
            return
        self.step += 1
        if self.step == len(CAP_STEPS):
            self.step = 0
            self._turn_back(best, starts)
        if self.aim is not None:
            self.length = self.patience * self.graph.size

    def _turn_back(self, best: Solution, starts: list[Solution]) -> None:
        """Nothing is left here: from the best, to a descent from another start; from such a descent, to the best."""
        if self.descent is None:
            self.failures += 1
            self.descent = starts[self.restarts % len(starts)] if starts else None
        else:
            self.descent = None
        if self.descent is None:
            self.patience *= 2
        self._restart(best if self.descent is None else self.descent)
        self.aim = None

    def _begin_run(self, best: Solution, starts: list[Solution]) -> None:
        """A run for latency: constant at first, then cooling, in turn from the best and from other starts."""
        turn = self.restarts + self.number
        ranked = sorted([best, *starts], key=self._promise)
        start = best if turn % 2 and self.restarts else ranked[(turn // 2) % len(ranked)]
        self._restart(start)
        constant = (self.restarts - 1) % 3 == 0
        per_operation = min(LONGEST_RUN_MOVES, RUN_MOVES * 2 ** ((self.restarts - 1) // 2))
        self.length, self.spent = per_operation * self.graph.size, 0
        if not constant:
            self.begin = COOLING[turn % len(COOLING)] * self.unit
            self.end = self.begin / 15

    def _restart(self, start: Solution) -> None:
        """Go on from `start` with other random numbers and the next constant temperature."""
        self.begin = self.end = TEMPERATURES[(self.restarts + self.number) % len(TEMPERATURES)] * self.unit
        self.go_on_from(start)

    def _rule(self, polish: bool, key: Key) -> Rule:
        if not polish:
            return self.limits(key[0], math.inf, PENALTY)._replace(target=float(self.objective.target))
        bound = float(self.objective.memory_bound(key[0]))
        wanted = key[1] - max(0.0, key[1] - bound) * CAP_STEPS[self.step]
        return self.limits(key[0], min(wanted, key[1] * (1 - 4 * TOLERANCE)), PENALTY)

    def _promise(self, start: Solution) -> float:
        """How good a start is, smaller is better: its makespan, longer by the share it is above the caps."""
        above = start.peak_memory / float(self.caps.min()) - 1 if np.isfinite(self.caps.min()) else 0.0
        return start.makespan * (1 + max(0.0, above))
