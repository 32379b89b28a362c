"""A walk through schedules of one problem: annealing runs, one after the other, until nothing is left to gain.

While the schedule to beat is not fast enough, a walk aims below its makespan: at a constant low
temperature first, then in cooling runs from warmer ones. After that it aims at the same makespan under a
lower memory cap, at the low temperature all the time: it stays close to schedules that are fast enough
and every cap that it meets is the start for the next,

    cap = peak - step (peak - memory bound)          step = 0.3; after fruitless moves 0.12, 0.04, just below

Annealing anew under a given cap ends in schedules that are slower by some ticks; going down from one
that is fast enough, step by step, does not. How far a descent gets is luck, so when all steps have
failed the walk makes another one from some other start, and from the best again after that.

Knows nothing of clocks, MPI or other walks; the same seed gives the same walk. Paper: section 5.2,
"Optimizing memory usage", where the latency is annealed first and the memory anew after it.
"""

from __future__ import annotations

import math

import numpy as np

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import TOLERANCE
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.ir.objective import Goal, Key, loosen, reaches
from rlhfuse.schedule.search.anneal import Rule, anneal
from rlhfuse.schedule.search.heads_tails import Tables, new_state
from rlhfuse.schedule.search.sequence import Found, Round, hash_seed, node_peaks

# Temperatures are in mean forward times.
TEMPERATURES = (0.1, 0.07, 0.13)  # constant; the walks of an MPI job begin with different ones
COOLING = (0.3, 0.6, 0.45)  # where cooling runs begin; they end at a fifteenth
PENALTY = 1.0  # mean forward times charged per position above the cap
FREE_MOVES = 32  # of one sweep over all operations that need not be critical, ...
FREE_SHARE = 0.3  # ... and at most this share
CAP_STEPS = (0.3, 0.12, 0.04, 0.0)
PATIENCE = 3_000  # moves per operation without success before the next step; doubled after the last
RUN_MOVES = 3_000  # per operation, of the first run for latency; doubled every other run, up to the next
LONGEST_RUN_MOVES = 25_600
DRIFT = 30  # moves per operation between two schedules that are met


class Walk:
    """One walk; `advance` makes a part of it."""

    def __init__(self, graph: OperationGraph, tables: Tables, goal: Goal, seed: int, number: int = 0) -> None:
        """`number` tells the walks of one search apart: each begins with other settings and random numbers."""
        self.graph, self.tables, self.goal = graph, tables, goal
        self.seed, self.number = seed, number
        durations = [graph.duration[lane.first] for lane in graph.lanes if lane.kind is Kind.F]
        self.unit = float(np.mean(durations))
        self.caps = np.array([loosen(graph.problem.node_cap(node)) for node in range(graph.problem.nodes)])
        self.state = None
        self.runs = 0
        self.aim: tuple | None = None  # what the walk is after: polish or not, and the key to beat
        self.own = False  # whether the walk itself met the schedule to beat
        self.begin = 0.0  # temperature at the start and the end of the present run
        self.end = 0.0
        self.length = self.spent = 0  # moves of the present run or step, and how many are made
        self.step = 0
        self.drift = 0  # moves to make before a schedule may be met again
        self.patience = PATIENCE
        self.beaten: Found | None = None  # the schedule to beat when last seen
        self.base: Found | None = None  # the best of a descent of its own, while it is on one
        self.failures = 0  # times that all steps from the best have failed

    @property
    def exhausted(self) -> bool:
        """Whether all steps have been tried twice, and another descent between, since the last success."""
        return self.failures >= 2

    def advance(self, best: Found, starts: list[Found], moves: int, late: bool = False) -> Round:
        """Try at most `moves` moves to beat `best`. `starts` are schedules to begin a run for latency with.

        With `late`, memory is improved at the makespan there is, fast enough or not.
        """
        if self.beaten is None or self.goal.key(best) != self.goal.key(self.beaten):
            self.beaten, self.failures, self.patience = best, 0, PATIENCE
        late = late and not self.goal.fast_enough(best.makespan)
        if late:
            self.base = None
        beaten = best if self.base is None else self.base
        polish = self.goal.objective == "memory" and (late or self.goal.fast_enough(beaten.makespan))
        key = self.goal.key(beaten)
        if (polish, key) != self.aim:
            self._take_aim(polish, key, beaten, starts)
        elif self.spent >= self.length:
            self._next(best, starts)
            return self.advance(best, starts, moves, late)
        moves = max(1, min(moves, self.length - self.spent))
        sequence = np.empty(self.graph.size, np.int64)
        rule = self._rule(key)
        beat = key[0] * (1 + 4 * TOLERANCE) if polish else key[0]
        warm, cold = self._temperature(self.spent), self._temperature(self.spent + moves)
        tried, accepted, makespan, _ = anneal(self.tables, self.state, rule, moves, warm, cold, sequence, beat)
        tried = max(1, tried)
        self.spent += tried
        if makespan >= beat:
            return Round(tried, None, accepted)
        self.own = True
        found = Found(makespan, max(node_peaks(self.tables, sequence)), sequence)
        if self.base is not None:  # on a descent of its own; the best is fast enough, or there would be none
            self.base = found
            if not self.goal.fast_enough(makespan) or reaches(best.peak_memory, found.peak_memory):
                return Round(tried, None, accepted)
            self.base = None
        return Round(tried, found, accepted)

    def meet(self, best: Found, peak: float, moves: int) -> Round:
        """Try at most `moves` moves to meet a schedule that is fast enough with less memory than `peak`.

        Never asks for less than `best` has. After each one that is met the walk drifts on for a while, so
        that the next is another one.
        """
        aim = ("meet", peak)
        if self.aim != aim:
            self.aim = aim
            self.drift = 0
            if self.state is None:
                self._restart(best)
        sequence = np.empty(self.graph.size, np.int64)
        rule = self._limits(self.goal.key(best)[0], max(peak * (1 - 2 * TOLERANCE), best.peak_memory))
        drift = self.drift > 0
        if drift:
            moves = min(moves, self.drift)
        beat = -math.inf if drift else float(self.goal.enough) * (1 + 4 * TOLERANCE)
        tried, accepted, makespan, _ = anneal(
            self.tables, self.state, rule, moves, self.begin, self.begin, sequence, beat
        )
        tried = max(1, tried)
        self.drift -= tried
        if makespan >= beat:
            return Round(tried, None, accepted)
        self.drift = DRIFT * self.graph.size
        return Round(tried, Found(makespan, max(node_peaks(self.tables, sequence)), sequence), accepted)

    def _take_aim(self, polish: bool, key: Key, best: Found, starts: list[Found]) -> None:
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
        if self.state is None or not was_polish or (not own and (self.number + self.runs) % 2):
            self._restart(best)

    def _next(self, best: Found, starts: list[Found]) -> None:
        """The present run or step has met nothing."""
        self.spent = 0
        if not self.aim[0]:
            if self.base is None:
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

    def _turn_back(self, best: Found, starts: list[Found]) -> None:
        """Nothing is left here: from the best, to a descent from another start; from such a descent, to the best."""
        if self.base is None:
            self.failures += 1
            self.base = starts[self.runs % len(starts)] if starts else None
        else:
            self.base = None
        if self.base is None:
            self.patience *= 2
        self._restart(best if self.base is None else self.base)
        self.aim = None

    def _begin_run(self, best: Found, starts: list[Found]) -> None:
        """A run for latency: constant at first, then cooling, in turn from the best and from other starts."""
        turn = self.runs + self.number
        ranked = sorted([best, *starts], key=self._promise)
        start = best if turn % 2 and self.runs else ranked[(turn // 2) % len(ranked)]
        self._restart(start)
        constant = (self.runs - 1) % 3 == 0
        per_operation = min(LONGEST_RUN_MOVES, RUN_MOVES * 2 ** ((self.runs - 1) // 2))
        self.length, self.spent = per_operation * self.graph.size, 0
        if not constant:
            self.begin = COOLING[turn % len(COOLING)] * self.unit
            self.end = self.begin / 15

    def _restart(self, start: Found) -> None:
        """Go on from `start` with other random numbers and the next constant temperature."""
        self.begin = self.end = TEMPERATURES[(self.runs + self.number) % len(TEMPERATURES)] * self.unit
        self.runs += 1
        self.state = new_state(start.sequence, hash_seed(self.seed, self.number, self.graph.size, self.runs))

    def _rule(self, key: Key) -> Rule:
        if not self.aim[0]:
            return self._limits(key[0], math.inf)._replace(target=float(self.goal.enough))
        bound = float(self.goal.memory_bound(key[0]))
        wanted = key[1] - max(0.0, key[1] - bound) * CAP_STEPS[self.step]
        return self._limits(key[0], min(wanted, key[1] * (1 - 4 * TOLERANCE)))

    def _limits(self, makespan: float, peak: float) -> Rule:
        """As fast as `makespan` with no more memory than `peak`."""
        return Rule(
            cap=np.minimum(self.caps, loosen(peak)),
            penalty=PENALTY * self.unit,
            free_share=min(FREE_SHARE, FREE_MOVES / self.graph.size),
            target=makespan,
            epsilon=min(1e-9 * makespan, float(self.graph.duration.min()) / 4),
        )

    def _temperature(self, done: int) -> float:
        return self.begin * math.exp(math.log(self.end / self.begin) * min(1.0, done / self.length))

    def _promise(self, start: Found) -> float:
        """How good a start is, smaller is better: its makespan, longer by the share it is above the caps."""
        above = start.peak_memory / float(self.caps.min()) - 1 if np.isfinite(self.caps.min()) else 0.0
        return start.makespan * (1 + max(0.0, above))
