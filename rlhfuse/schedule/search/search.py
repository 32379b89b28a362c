"""Finds a fused schedule by simulated annealing, alone or on every rank of an MPI job.

The first schedule made by rule is the incumbent at once. Every rank runs its own SearchWorker; after every round of
moves the ranks agree on the best solution (mpi.py), so that all hold the same incumbent and stop together: when nothing
can be better, when the budget is spent, or when a signal asks one of them. Paper: section 5.2, Algorithm 1; section 6.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.kernel_cache import compile_apart
from rlhfuse.schedule.ir.evaluate import reaches
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import check_caps, greedy, min_memory
from rlhfuse.schedule.search.admission_rules import reached_by_rule
from rlhfuse.schedule.search.mpi import Exchange, in_turn
from rlhfuse.schedule.search.solution import Incumbent, Key, Objective, Round, schedule_of
from rlhfuse.schedule.search.worker import SearchWorker, kernel_group, load_kernels

ROUND_SECONDS = 0.15  # between two looks at the clock, the other ranks and the signals
FIRST_TRIES = 24  # decodes of the first schedule under a cap
FIRST_ROUND_MOVES = 256  # of the second round; the first is one move
FIXED_ROUND_WORK = 20_000_000  # moves of a round times operations, where the number of moves is the budget


@dataclass(frozen=True)
class SearchSettings:
    """What to search for and how long; at least one of `time_limit` and `iterations` is needed.

    time_limit   seconds from when the kernels are ready; a round lasts about ROUND_SECONDS
    iterations   moves of every rank; the result depends on seed and number of ranks alone
    objective, latency: those of `solution.Objective`. Raises InputError when out of range.
    """

    time_limit: float | None = None
    iterations: int | None = None
    seed: int = 1
    objective: str = "latency"
    latency: Number | None = None

    def __post_init__(self) -> None:
        if self.time_limit is None and self.iterations is None:
            raise InputError("the search has no end: give time_limit (seconds) or iterations (moves)")
        for name, value in (("time_limit", self.time_limit), ("iterations", self.iterations)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name}={value} must be above 0")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must be at least 0")


@dataclass(frozen=True)
class SearchReport:
    """Where a search stands, in the problem's units; `moves` and `accepted` count swaps over all ranks."""

    makespan: Number
    lower_bound: Number
    peak_memory: Number
    memory_lower_bound: Number
    moves: int
    accepted: int
    seconds: float
    first_seconds: float  # when the first schedule was there
    kernel_seconds: float  # compiling the kernels, or loading them compiled
    moving_seconds: float  # of rank 0, in rounds of moves after that
    first_bound_seconds: float | None  # when the latency bound was reached
    settings: SearchSettings
    ranks: int
    signal: int  # that ended it; 0 for none

    @property
    def optimal(self) -> bool:
        """Whether the makespan is proved to be the least possible."""
        return reaches(self.makespan, self.lower_bound)


class SearchObserver:
    """Whom a search tells of its progress, on rank 0, and asks for a stop, on every rank; this one does nothing."""

    def improved(self, schedule: Schedule, report: SearchReport) -> None:
        """A new best schedule."""

    def round_ended(self, report: SearchReport) -> None:
        """After every round, and again and again while rank 0 waits for other ranks."""

    def stop(self) -> int:
        """Asked after every round: the number of a signal ends the search on all ranks, 0 goes on."""
        return 0


def search(
    problem: FusionProblem,
    settings: SearchSettings,
    *,
    start: Schedule | None = None,
    comm: Any = None,
    observer: SearchObserver | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Schedule, SearchReport]:
    """Search until a proved optimum, the time limit or the number of moves.

    `start` is a schedule to improve on, `comm` an mpi4py communicator. All ranks return the same schedule, never slower
    than greedy unless greedy breaks the memory cap. KeyboardInterrupt passes through. Raises InputError on a cap that
    no schedule meets and as `Objective` does. All seconds are those of `clock`.
    """
    observer, budget = observer or SearchObserver(), _Budget(settings, clock)
    rank, ranks = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)
    with in_turn(comm):
        waited = budget.seconds()
        compile_apart([kernel_group()])  # bounds have kernels too: compiled later they would take the search's time
        load_kernels()
        budget.kernel_seconds = budget.seconds() - waited
        budget.uncounted = waited + budget.kernel_seconds
        check_caps(problem)
        objective = Objective(problem, settings.objective, settings.latency)
        graph = build_graph(problem)
        budget.fixed_round = max(1000, min(50_000, FIXED_ROUND_WORK // graph.size))
        starts = _starts(problem, graph, start)
        told = observer if rank == 0 else SearchObserver()
        state = _SearchState(objective, budget, ranks, told.improved, starts[-1])
    exchange = Exchange(graph.size, comm, (lambda: observer.round_ended(state.report())) if rank == 0 else lambda: None)
    worker = SearchWorker(graph, objective, starts, settings.seed, rank)
    done = Round(0, None)
    while True:
        result = exchange.agree(done, budget.share(), observer.stop(), state.beats)
        state.moves += result.tried
        state.accepted += result.accepted
        state.signal = result.signal
        if result.sequence is not None:
            state.offer(Incumbent.of(schedule_of(graph, result.sequence)))
        if rank == 0:
            observer.round_ended(state.report())
        if state.reached or result.share >= 1 or result.signal:
            state.prove_memory()
            return state.incumbent.schedule, state.report()
        done = budget.timed(lambda moves: worker.round(state.incumbent, moves, result.share))


def _starts(problem: FusionProblem, graph: OperationGraph, start: Schedule | None) -> list[Incumbent]:
    """The schedules to begin with; the last one fits the caps."""
    first = Incumbent.of(greedy(problem) if start is None else Schedule(problem, start.orders))
    if first.fits():
        return [first]
    return [first, Incumbent.of(schedule_of(graph, reached_by_rule(problem, FIRST_TRIES).sequence))]


class _SearchState:
    """The best schedule so far, and what is reported of it."""

    def __init__(
        self,
        objective: Objective,
        budget: _Budget,
        ranks: int,
        improved: Callable[[Schedule, SearchReport], None],
        start: Incumbent,
    ) -> None:
        self.objective, self.budget, self.ranks, self.improved = objective, budget, ranks, improved
        self.memory_bound: Number = max(min_memory(objective.problem))
        self.moves = self.accepted = self.signal = 0
        self.first_seconds = budget.seconds()
        self.first_bound_seconds: float | None = None
        self._take(start)

    def beats(self, key: Key) -> bool:
        """Whether a schedule of this makespan and peak memory would be the new best."""
        return (max(key[0], self.objective.target), key[1]) < self.objective.key(self.incumbent.timeline)

    def offer(self, entry: Incumbent) -> None:
        """Make `entry` the best one if it fits the caps and is better."""
        if self.beats((entry.timeline.makespan, entry.timeline.peak_memory)) and entry.fits():
            self._take(entry)

    def _take(self, entry: Incumbent) -> None:
        timeline = entry.timeline
        self.incumbent, self.reached = entry, self.objective.reached(timeline)  # reached: nothing can be better
        if self.objective.fast_enough(timeline.makespan):
            self.prove_memory()
        if self.first_bound_seconds is None and reaches(timeline.makespan, self.objective.latency_bound):
            self.first_bound_seconds = self.budget.seconds()
        self.improved(entry.schedule, self.report())

    def prove_memory(self) -> None:
        """Raise the bound to what the best makespan needs: seconds on a large problem, so not at every better one."""
        self.memory_bound = self.objective.memory_bound(self.incumbent.timeline.makespan)

    def report(self) -> SearchReport:
        timeline = self.incumbent.timeline
        return SearchReport(
            makespan=timeline.makespan,
            lower_bound=self.objective.latency_bound,
            peak_memory=timeline.peak_memory,
            memory_lower_bound=self.memory_bound,
            moves=self.moves,
            accepted=self.accepted,
            seconds=self.budget.seconds(),
            first_seconds=self.first_seconds,
            kernel_seconds=self.budget.kernel_seconds,
            moving_seconds=self.budget.moving_seconds,
            first_bound_seconds=self.first_bound_seconds,
            settings=self.budget.settings,
            ranks=self.ranks,
            signal=self.signal,
        )


class _Budget:
    """How much this rank has used, in seconds or moves, and how many moves its next round has."""

    def __init__(self, settings: SearchSettings, clock: Callable[[], float]) -> None:
        self.clock, self.started = clock, clock()
        self.settings = settings
        self.moves = 0
        self.pace = 1  # of the first round, which makes the worker's own starts
        self.fixed_round = 1
        self.kernel_seconds = self.moving_seconds = 0.0
        self.uncounted = 0.0  # before the search: kernels are compiled on a machine's first use, in turn on a host

    def seconds(self) -> float:
        return self.clock() - self.started

    def share(self) -> float:
        """Share of the budget that is used; 1 when it is spent."""
        time_limit, iterations = self.settings.time_limit, self.settings.iterations
        spent = (self.seconds() - self.uncounted) / time_limit if time_limit is not None else 0.0
        return max(spent, self.moves / iterations if iterations is not None else 0.0)

    def timed(self, play: Callable[[int], Round]) -> Round:
        """Play one round and set the pace of the next; nothing is played when this rank's moves are used up."""
        time_limit, iterations = self.settings.time_limit, self.settings.iterations
        moves = self.pace if iterations is None else min(self.pace, iterations - self.moves)
        if moves <= 0:
            return Round(0, None)
        before = self.seconds()
        done = play(moves)
        now = self.seconds()
        self.moves += done.tried
        if self.pace == 1:
            self.pace = FIRST_ROUND_MOVES
        else:
            self.moving_seconds += now - before
            left = math.inf if time_limit is None else time_limit + self.uncounted - now
            wanted = min(ROUND_SECONDS, left)
            self.pace = min(8 * self.pace, max(2, int(done.tried * wanted / max(now - before, 1e-6))))
        if iterations is not None:
            self.pace = self.fixed_round
        return done
