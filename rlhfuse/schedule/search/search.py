"""Finds a fused schedule: one chain of annealing alone, or one on every rank of an MPI job.

The first schedule made by rule stands at once as incumbent, then the best of them. Every MPI rank runs
its own chain (own random stream, own starts); after every round of moves the ranks agree on the best
find (exchange.py), so that all hold the same incumbent and stop together: when nothing can be better,
when the budget is spent, or when a signal asks one of them.

    time_limit   a round lasts as many moves as this rank makes in ROUND_SECONDS, whatever the instance
    iterations   a round has a fixed number of moves; the result depends on seed and number of ranks alone

Knows nothing of files or layouts. mpi4py is imported by the caller's wish only. Paper: section 5.2,
Algorithm 1; section 6, MPI.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.objective import Goal, Incumbent, Key, reaches
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.schedule.rules.min_memory import check_caps, one_at_a_time
from rlhfuse.schedule.search.exchange import Exchange, Say
from rlhfuse.schedule.search.kernels import in_turn, load_kernels
from rlhfuse.schedule.search.paper_chain import PaperChain, PaperSettings, paper_starts
from rlhfuse.schedule.search.sequence import Round, schedule_of
from rlhfuse.schedule.search.worker import Chain

METHODS = ("default", "paper")
ROUND_SECONDS = 0.15  # between two looks at the clock, the other ranks and the signals
FIRST_ROUND_MOVES = 256  # of the second round; the first is one move
FIXED_ROUND_WORK = 20_000_000  # moves of a round times operations, where the number of moves is the budget


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
    seed: int
    ranks: int
    objective: str
    method: str
    signal: int  # that ended it; 0 for none

    @property
    def optimal(self) -> bool:
        """Whether the makespan is proved to be the least possible."""
        return reaches(self.makespan, self.lower_bound)


def search(
    problem: FusionProblem,
    *,
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 1,
    objective: str = "latency",
    latency: Number | None = None,
    memory_cap: float | None = None,
    start: Schedule | None = None,
    comm: Any = None,
    method: str = "default",
    paper: PaperSettings = PaperSettings(),
    stop: Callable[[], int] = lambda: 0,
    on_improved: Callable[[Schedule, SearchReport], None] = lambda schedule, report: None,
    on_round: Callable[[SearchReport], None] = lambda report: None,
) -> tuple[Schedule, SearchReport]:
    """Search until a proved optimum, `time_limit` seconds or `iterations` moves per rank.

    The limit counts from when the kernels are ready: what is found must not depend on whether this machine
    has compiled them before.

    `objective` and `latency` are those of `goal.Goal`. `memory_cap` replaces the problem's cap (static
    memory still counts); `start` is a schedule to improve on; `comm` is an mpi4py communicator; `method`
    is the project's own search or the paper's, whose settings are `paper`. `stop` is asked after every
    round on every rank: a signal's number ends the search on all of them. The other callbacks run on
    rank 0, `on_round` also while it waits for other ranks. All ranks return the same schedule, never
    slower than greedy unless greedy breaks the cap. KeyboardInterrupt passes through. Raises InputError
    on settings out of range and on a cap that no schedule meets.
    """
    _check_settings(time_limit, iterations, seed, memory_cap)
    if method not in METHODS:
        raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")
    clock = _Clock(time_limit, iterations)
    if memory_cap is not None:
        problem = replace(problem, memory_cap=memory_cap)
    rank, ranks = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)
    tell = on_improved if rank == 0 else lambda schedule, report: None
    with in_turn(comm, _host(comm)):
        waited = clock.seconds()
        check_caps(problem)
        goal = Goal(problem, objective, latency)
        graph = build_graph(problem)
        clock.fixed_round = max(1000, min(50_000, FIXED_ROUND_WORK // graph.size))
        standing = _Standing(goal, clock, seed, ranks, method, tell)
        starts: list[Incumbent] = []
        for entry in _starts(graph, start, method):
            starts.append(entry)
            standing.offer(entry)
        before = clock.seconds()
        if not standing.reached:
            load_kernels(method)
        clock.kernel_seconds = clock.seconds() - before
        clock.uncounted = waited + clock.kernel_seconds
    least, idle = _least(comm), (lambda: on_round(standing.report())) if rank == 0 else (lambda: None)
    exchange = Exchange(graph.size, comm, least, idle)
    if method == "paper":
        chain: Chain | PaperChain = PaperChain(graph, goal, starts, seed, rank, paper)
    else:
        chain = Chain(graph, goal, starts, seed, rank)
    done = Round(0, None)
    while True:
        heard = exchange.agree(_say(done, clock.share(), stop()), standing.beats)
        standing.moves += heard.tried
        standing.accepted += heard.accepted
        standing.signal = heard.signal
        if heard.sequence is not None:
            standing.offer(Incumbent.of(schedule_of(graph, heard.sequence)))
        if rank == 0:
            on_round(standing.report())
        if standing.reached or heard.share >= 1 or heard.signal:
            return standing.best.schedule, standing.report()
        done = clock.timed(lambda moves: chain.round(standing.best, moves, heard.share))


def _starts(graph: OperationGraph, start: Schedule | None, method: str) -> Iterator[Incumbent]:
    """The schedules to begin with; one of them fits the caps."""
    problem = graph.problem
    if method == "paper":
        yield from paper_starts(problem, start)
        return
    first = Incumbent.of(greedy(problem) if start is None else Schedule(problem, start.orders))
    yield first
    if not first.fits():
        yield Incumbent.of(one_at_a_time(problem))


class _Standing:
    """The best schedule so far, and what is told about it."""

    def __init__(
        self,
        goal: Goal,
        clock: _Clock,
        seed: int,
        ranks: int,
        method: str,
        on_improved: Callable[[Schedule, SearchReport], None],
    ) -> None:
        self.goal, self.clock, self.on_improved = goal, clock, on_improved
        self.seed, self.ranks, self.method = seed, ranks, method
        self.best: Incumbent | None = None
        self.reached = False  # nothing can be better
        self.moves = self.accepted = self.signal = 0
        self.first: float | None = None
        self.first_bound: float | None = None

    def beats(self, key: Key) -> bool:
        """Whether a schedule of this makespan and peak memory would be the new best."""
        makespan, peak = key
        return self.best is None or (max(makespan, self.goal.enough), peak) < self.goal.key(self.best.timeline)

    def offer(self, entry: Incumbent) -> None:
        """Make `entry` the best one if it fits the caps and is better."""
        timeline = entry.timeline
        if not self.beats((timeline.makespan, timeline.peak_memory)) or not entry.fits():
            return
        self.best, self.reached = entry, self.goal.reached(timeline)
        self.memory_bound = self.goal.memory_bound(timeline.makespan)
        if self.first is None:
            self.first = self.clock.seconds()
        if self.first_bound is None and reaches(timeline.makespan, self.goal.latency_bound):
            self.first_bound = self.clock.seconds()
        self.on_improved(entry.schedule, self.report())

    def report(self) -> SearchReport:
        return SearchReport(
            makespan=self.best.timeline.makespan,
            lower_bound=self.goal.latency_bound,
            peak_memory=self.best.timeline.peak_memory,
            memory_lower_bound=self.memory_bound,
            moves=self.moves,
            accepted=self.accepted,
            seconds=self.clock.seconds(),
            first_seconds=self.first,
            kernel_seconds=self.clock.kernel_seconds,
            moving_seconds=self.clock.moving_seconds,
            first_bound_seconds=self.first_bound,
            seed=self.seed,
            ranks=self.ranks,
            objective=self.goal.objective,
            method=self.method,
            signal=self.signal,
        )


class _Clock:
    """How much of the budget this rank has used, in seconds or moves, and how many moves its next round has."""

    def __init__(self, time_limit: float | None, iterations: int | None) -> None:
        self.started = time.monotonic()
        self.time_limit, self.iterations = time_limit, iterations
        self.moves = 0
        self.pace = 1  # of the first round, which makes the chain's own starts
        self.fixed_round = 1
        self.kernel_seconds = self.moving_seconds = 0.0
        self.uncounted = 0.0  # before the search: kernels are compiled on a machine's first use, in turn on a host

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def share(self) -> float:
        spent = (self.seconds() - self.uncounted) / self.time_limit if self.time_limit is not None else 0.0
        return max(spent, self.moves / self.iterations if self.iterations is not None else 0.0)

    def timed(self, play: Callable[[int], Round]) -> Round:
        """Play one round and set the pace of the next; nothing is played when this rank's moves are used up."""
        moves = self.pace if self.iterations is None else min(self.pace, self.iterations - self.moves)
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
            left = math.inf if self.time_limit is None else self.time_limit + self.uncounted - now
            wanted = min(ROUND_SECONDS, left)
            self.pace = min(8 * self.pace, max(2, int(done.tried * wanted / max(now - before, 1e-6))))
        if self.iterations is not None:
            self.pace = self.fixed_round
        return done


def _say(done: Round, share: float, signal: int) -> Say:
    found = done.found
    key, sequence = (found[:2], found.sequence) if found is not None else (Say().key, None)
    return Say(key, sequence, share, signal, done.tried, done.accepted)


def _host(comm: Any) -> Any:
    """The communicator of this host's ranks, where there is a communicator."""
    if comm is None:
        return None
    from mpi4py import MPI

    return comm.Split_type(MPI.COMM_TYPE_SHARED)


def _least(comm: Any) -> Any:
    """MPI's MIN, where there is a communicator."""
    if comm is None:
        return None
    from mpi4py import MPI

    return MPI.MIN


def _check_settings(time_limit: float | None, iterations: int | None, seed: int, memory_cap: float | None) -> None:
    if time_limit is None and iterations is None:
        raise InputError("the search has no end: give time_limit (seconds) or iterations (moves)")
    for name, value in (("time_limit", time_limit), ("iterations", iterations), ("memory_cap", memory_cap)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name}={value} must be above 0")
    if seed < 0:
        raise InputError(f"seed={seed} must be at least 0")


def world_communicator() -> Any:
    """MPI's world communicator. Raises InputError when mpi4py or an MPI library is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(f"started under mpirun but MPI cannot be loaded ({error}); pip install rlhfuse[mpi]") from None
    return MPI.COMM_WORLD
