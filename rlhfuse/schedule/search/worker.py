"""One rank's part of a search: annealing of the problem and of coarser ones with fewer micro-batches, or nodes too.

Where every further unit of micro-batches adds the same time to the latency bound, half the units are annealed too, half
of these again, and so on; under a tight cap few units alone. Their steady states are extended to the next level
(steady_state.py). Large problems without such are folded (folding.py). The levels take turns, round by round. One with
nothing left to gain goes on for leaner schedules than the next level's: not every one has a middle to be repeated.
"""

from __future__ import annotations

import math

from rlhfuse.base.kernel_cache import KernelGroup, tell_what_is_compiled
from rlhfuse.schedule.bounds.window_rules import contradiction
from rlhfuse.schedule.ir.evaluate import reaches
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time, serial_1f1b
from rlhfuse.schedule.search.admission_rules import AdmissionRules
from rlhfuse.schedule.search.annealing_run import AnnealingRun
from rlhfuse.schedule.search.capped_run import CappedRun
from rlhfuse.schedule.search.dispatch import Dispatcher, list_operations, tuned_starts
from rlhfuse.schedule.search.folding import Unfolder, folded_problem
from rlhfuse.schedule.search.solution import Incumbent, Objective, Round, Solution, fits, solution_of
from rlhfuse.schedule.search.steady_state import SteadyStateExtender, coarser_problem, few_units
from rlhfuse.schedule.search.under_cap.admissions import Admissions

FOLDED_OPERATIONS = 4096  # of a level: one with more, and none of fewer units below it, is folded
CAPPED_OPERATIONS = 2_000_000  # over all decodes of a level's starts under a cap, about a second; ...
LEAST_TRIES, MOST_TRIES = 200, 3_000  # ... so many of them
ADMISSION_OPERATIONS = 2_500  # of a level whose admissions are annealed
NEARER = 0.5  # times the time that the next level may gain: so near its target a solution is worth extending
EXTENDED_STARTS = 3  # kept by a level to begin its runs with, besides those made by rule


class CoarseLevel:
    """The problem with some number of units (all of them at the top): its annealing run, best solution, starts.

    It is `tight` where a memory cap leaves no room for the starts of a problem without one: schedules are then made
    under the cap, and admissions annealed in turn with the best of them.
    """

    def __init__(
        self, graph: OperationGraph, objective: Objective, given: list[Incumbent], seed: int, rank: int
    ) -> None:
        self.graph, self.objective = graph, objective
        self.dispatcher = Dispatcher(graph)
        tuned = tuned_starts(Dispatcher(graph, capped=False))
        self.tight = not any(fits(graph, start) for start in tuned)
        self.starts = tuned + [solution_of(graph, entry) for entry in given]
        fitting = [start for start in self.starts if fits(graph, start)]
        if self.tight:
            tries = min(MOST_TRIES, max(LEAST_TRIES, CAPPED_OPERATIONS // graph.size))
            fitting += AdmissionRules(self.dispatcher, f"{seed} {rank}").search(tries, float(objective.target))
            self.admissions = Admissions(self.dispatcher, f"{seed} {rank}")
        self.best = min(fitting, key=objective.key)
        self.extended: list[Solution] = []
        self.run = AnnealingRun(graph, objective, seed, rank)
        self.capped = CappedRun(graph, objective, seed, rank)
        self.turn = 0

    def better(self, solution: Solution) -> bool:
        """Whether `solution` beats the best by more than rounding."""
        mine, other = self.objective.key(solution), self.objective.key(self.best)
        if reaches(mine[0], other[0]) and reaches(other[0], mine[0]):
            return not reaches(other[1], mine[1])
        return mine[0] < other[0]

    @property
    def fast_enough(self) -> bool:
        return self.objective.fast_enough(self.best.makespan)

    @property
    def finished(self) -> bool:
        """Whether its own annealing has nothing left to gain."""
        if self.objective.kind == "latency":
            return self.fast_enough
        proved = self.fast_enough and reaches(self.best.peak_memory, self.objective.memory_bound(self.best.makespan))
        return proved or self.run.exhausted or self.capped.exhausted

    def advance(self, moves: int, late: bool) -> Round:
        """Try at most `moves` moves to beat the best. Memory is improved by steps, and where these fail also by capped
        runs, in turn; ranks of odd numbers make capped runs only. Under a tight cap runs begin at the best alone, and
        admissions take turns with them."""
        if self.objective.kind == "memory" and self.fast_enough:
            self.turn += 1
            if self.run.number % 2 or (self.run.fruitless and self.turn % 2):
                return self.capped.advance(self.best, self.starts, moves)
        if not self.tight or self.fast_enough:
            return self.run.advance(self.best, self.starts + self.extended, moves, late)
        self.turn += 1
        if self.turn % 2 and self.graph.size <= ADMISSION_OPERATIONS:
            return self.admissions.advance(self.best, moves)
        return self.run.advance(self.best, [], moves)

    def keep_start(self, solution: Solution) -> None:
        """Remember a solution that is not fast enough, in place of the slowest."""
        self.extended = sorted([*self.extended, solution], key=lambda s: s.makespan)[:EXTENDED_STARTS]


class SearchWorker:
    """The levels, the coarsest first, and whose turn it is. The same seed and rank give the same rounds."""

    def __init__(
        self, graph: OperationGraph, objective: Objective, starts: list[Incumbent], seed: int, rank: int
    ) -> None:
        self.levels = [CoarseLevel(graph, objective, starts, seed, rank)]
        self.extenders: list[SteadyStateExtender | Unfolder] = []
        while self._put_below(seed, rank):
            pass
        self.work = [0] * len(self.levels)  # moves tried, and operations placed by extensions, which take as long
        self.incumbent: Incumbent | None = None  # the owner's best when last seen

    def _put_below(self, seed: int, rank: int) -> bool:
        """Put a coarser level below the lowest, if there is one."""
        above = self.levels[0]
        problem, latency = above.objective.problem, above.objective.latency
        small = few_units(problem) if above.tight else coarser_problem(problem)
        folded = small is None and not above.tight and above.graph.size > FOLDED_OPERATIONS
        if folded:
            small = folded_problem(problem)
        if small is None:
            return False
        if latency is not None:  # as much slack as there is above
            latency = max(0, latency - above.objective.latency_bound) + Objective(small).latency_bound
        given = [Incumbent.of(serial_1f1b(small)), Incumbent.of(one_at_a_time(small))]
        graph, objective = build_graph(small), Objective(small, above.objective.kind, latency)
        level = CoarseLevel(graph, objective, given, seed, rank)
        self.levels.insert(0, level)
        if folded:
            self.extenders.insert(0, Unfolder(graph, above.dispatcher))
        else:
            self.extenders.insert(0, SteadyStateExtender(graph, above.dispatcher, stretched=above.tight))
        return True

    def round(self, best: Incumbent, moves: int, share: float) -> Round:
        """Try at most `moves` moves (at least 1) to beat `best`; `share` of the whole search is over (0 to 1)."""
        top = self.levels[-1]
        if best is not self.incumbent:
            begin, self.incumbent = self.incumbent is None, best
            tuned, top.best = top.best, solution_of(top.graph, best)
            if begin and top.better(tuned):
                return Round(1, tuned)
        number = self._next_level()
        level = self.levels[number]
        if number < len(self.levels) - 1 and level.finished:
            above = self.levels[number + 1]
            done = level.run.find_leaner(level.best, above.best.peak_memory if above.fast_enough else math.inf, moves)
        else:
            late = share > 0.5 and top.objective.latency is None and not top.dispatcher.capped
            done = level.advance(moves, late)
        self.work[number] += done.tried
        solution = None if done.solution is None else self._lift(number, done.solution)
        return Round(done.tried, solution, done.accepted)

    def _next_level(self) -> int:
        """Level with the least work of those that can still help; none makes up for when it could not."""
        last = len(self.levels) - 1
        able = [number for number in range(last) if self._helps(number)] + [last]
        least = min(self.work[number] for number in able)
        self.work = [work if number in able else max(work, least) for number, work in enumerate(self.work)]
        return min(able, key=lambda number: self.work[number])

    def _helps(self, number: int) -> bool:
        level, above = self.levels[number], self.levels[number + 1]
        if not level.finished:
            return True
        if not above.fast_enough:
            return level.fast_enough and isinstance(self.extenders[number], SteadyStateExtender)
        leaner = not reaches(above.best.peak_memory, level.best.peak_memory)
        return level.objective.kind == "memory" and leaner and level.fast_enough

    def _lift(self, number: int, solution: Solution) -> Solution | None:
        """Take `solution` into its level, and its extensions into those above; what is new at the top, if any."""
        level, top = self.levels[number], number == len(self.levels) - 1
        if level.better(solution):
            level.best = solution
        elif top:
            return None
        if top:
            return solution
        above = self.levels[number + 1]
        if not level.objective.fast_enough(solution.makespan):
            to_gain = above.best.makespan - above.objective.target
            if solution.makespan - level.objective.target > NEARER * to_gain:
                return None
        if above.fast_enough and reaches(above.best.peak_memory, solution.peak_memory):
            return None
        self.work[number] += self.extenders[number].work
        lifted, fastest = self.extenders[number].extend(solution, above.better)
        if not above.fast_enough:
            above.keep_start(fastest)
        return self._lift(number + 1, lifted) if lifted is not None else None


def load_kernels() -> None:
    """Load every numba kernel of a search by a few moves on a tiny problem; compiles what is not cached: seconds."""
    times = ((1, 1), (2, 2), (1, 1))
    one = Pipeline("one", "one", (0, 1), 8, *times)
    problem = FusionProblem(2, (one, Pipeline("two", "two", (1, 0), 8, *times)))
    start = Incumbent.of(greedy(problem))
    worker = SearchWorker(build_graph(problem), Objective(problem, "memory"), [start], 1, 0)
    for _ in range(2):  # the first may bring nothing but a start
        worker.round(start, 1, 0.0)
    for number, extender in enumerate(worker.extenders):
        extender.extend(worker.levels[number].best, worker.levels[number + 1].better)


def kernel_group() -> KernelGroup:
    """Those of a search, for a process of their own."""
    return KernelGroup((contradiction, list_operations), "rlhfuse.schedule.search.worker")


if __name__ == "__main__":
    tell_what_is_compiled()
    load_kernels()
