"""One rank's part of a search: walks through the problem and through smaller ones of the same kind.

Where every further unit of micro-batches adds the same time to the latency bound, schedules of half the
units are walked through too, half of these again, and so on; what is met there is stretched to the next
level (stretch.py), up to the problem itself. The levels take turns, round by round. A level that has
nothing left to gain goes on meeting schedules leaner than the best of the next level, since not every
one has a middle that can be repeated.

Knows nothing of clocks, MPI or files; the same seed and rank give the same rounds.
"""

from __future__ import annotations

import math

from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.objective import Goal, Incumbent, loosen, reaches
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.rules.min_memory import one_at_a_time
from rlhfuse.schedule.search.annealing_run import Walk
from rlhfuse.schedule.search.dispatch import Dispatcher, tuned_starts
from rlhfuse.schedule.search.sequence import Found, Round, node_peaks, sequence_of, tables_of
from rlhfuse.schedule.search.steady_state import Stretcher, coarser, period_of, units_of

STRETCHED_STARTS = 3  # kept by a level to begin its runs with, besides those made by rule


class Level:
    """The problem with some number of units: its walk, the best schedule that is known of it, its starts.

    Raises ValueError when no schedule of `given` nor any made here fits the caps.
    """

    def __init__(self, graph: OperationGraph, goal: Goal, given: list[Incumbent], seed: int, rank: int) -> None:
        self.graph, self.goal = graph, goal
        self.tables = tables_of(graph)
        self.starts = [*tuned_starts(Dispatcher(graph, self.tables)), *map(self.found, given)]
        self.best = min(filter(self._fits, self.starts), key=goal.key)
        self.stretched: list[Found] = []
        self.walk = Walk(graph, self.tables, goal, seed, rank)

    def found(self, entry: Incumbent) -> Found:
        timeline = entry.timeline
        return Found(float(timeline.makespan), float(timeline.peak_memory), sequence_of(self.graph, entry.schedule))

    def _fits(self, found: Found) -> bool:
        problem = self.graph.problem
        peaks = node_peaks(self.tables, found.sequence)
        return all(peak <= loosen(problem.node_cap(node)) for node, peak in enumerate(peaks))

    def better(self, found: Found) -> bool:
        """Whether `found` beats the best by more than rounding."""
        mine, other = self.goal.key(found), self.goal.key(self.best)
        if reaches(mine[0], other[0]) and reaches(other[0], mine[0]):
            return not reaches(other[1], mine[1])
        return mine[0] < other[0]

    @property
    def fast_enough(self) -> bool:
        return self.goal.fast_enough(self.best.makespan)

    @property
    def finished(self) -> bool:
        """Whether its own walk has nothing left to gain."""
        if self.goal.objective == "latency":
            return self.fast_enough
        proved = self.fast_enough and reaches(self.best.peak_memory, self.goal.memory_bound(self.best.makespan))
        return proved or self.walk.exhausted

    def advance(self, moves: int, late: bool) -> Round:
        return self.walk.advance(self.best, self.starts + self.stretched, moves, late)

    def keep_start(self, found: Found) -> None:
        """Remember a schedule that is not fast enough, in place of the slowest."""
        self.stretched = sorted([*self.stretched, found], key=lambda f: f.makespan)[:STRETCHED_STARTS]


class Chain:
    """The levels, the smallest problem first, and whose turn it is."""

    def __init__(self, graph: OperationGraph, goal: Goal, starts: list[Incumbent], seed: int, rank: int) -> None:
        self.levels = [Level(graph, goal, starts, seed, rank)]
        self.stretchers: list[Stretcher] = []
        while (small := coarser(self.levels[0].goal.problem)) is not None:
            self._put_below(small, seed, rank)
        self.turn = 0
        self.incumbent: Incumbent | None = None  # the owner's best when last seen

    def _put_below(self, small: FusionProblem, seed: int, rank: int) -> None:
        above = self.levels[0]
        latency = above.goal.latency
        if latency is not None:  # as much slack as there is above
            added = (units_of(above.goal.problem) - units_of(small)) * period_of(small)
            latency = max(latency - added, Goal(small).latency_bound)
        given = [Incumbent.of(serial_1f1b(small)), Incumbent.of(one_at_a_time(small))]
        graph = build_graph(small)
        self.levels.insert(0, Level(graph, Goal(small, above.goal.objective, latency), given, seed, rank))
        self.stretchers.insert(0, Stretcher(graph, self.levels[0].tables, above.graph, above.tables))

    def round(self, best: Incumbent, moves: int, share: float) -> Round:
        """Try at most `moves` moves (at least 1) to beat `best`; `share` of the whole search is over (0 to 1)."""
        top = self.levels[-1]
        if best is not self.incumbent:
            begin, self.incumbent = self.incumbent is None, best
            tuned, top.best = top.best, top.found(best)
            if begin and top.better(tuned):
                return Round(1, tuned)
        number = self._whose_turn()
        level = self.levels[number]
        if number < len(self.levels) - 1 and level.finished:
            above = self.levels[number + 1]
            done = level.walk.meet(level.best, above.best.peak_memory if above.fast_enough else math.inf, moves)
        else:
            done = level.advance(moves, late=share > 0.5 and top.goal.latency is None)
        found = None
        if done.found is not None:
            found = self._lift(number, done.found)
        return Round(done.tried, found, done.accepted)

    def _whose_turn(self) -> int:
        """The levels that can still help, in turn."""
        last = len(self.levels) - 1
        able = [number for number in range(last) if self._helps(number)]
        self.turn += 1
        return ([*able, last])[(self.turn - 1) % (len(able) + 1)]

    def _helps(self, number: int) -> bool:
        level, above = self.levels[number], self.levels[number + 1]
        if not level.finished:
            return True
        if not above.fast_enough:
            return level.fast_enough
        leaner = not reaches(above.best.peak_memory, level.best.peak_memory)
        return level.goal.objective == "memory" and leaner and level.fast_enough

    def _lift(self, number: int, found: Found) -> Found | None:
        """Take `found` into its level, and what can be made of it into those above; what is new at the top, if any."""
        level = self.levels[number]
        if level.better(found):
            level.best = found
        elif number == len(self.levels) - 1:
            return None
        if number == len(self.levels) - 1:
            return found
        if not level.goal.fast_enough(found.makespan):
            return None
        above = self.levels[number + 1]
        if above.fast_enough and reaches(above.best.peak_memory, found.peak_memory):
            return None
        lifted, nearest = self.stretchers[number].best(found, above.better)
        if not above.fast_enough:
            above.keep_start(nearest)
        return self._lift(number + 1, lifted) if lifted is not None else None
