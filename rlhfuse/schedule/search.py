"""Finds a fused schedule: one chain of annealing alone, or one on every rank of an MPI job.

The schedules made by rule stand at once as the first incumbent. Then every MPI rank runs its own chain
(own random stream, own starts); after every round of moves the ranks exchange improvements in one
collective, so that all hold the same incumbent and stop together: when nothing can be better, at the
time limit or at the number of moves. With `iterations` instead of a time limit the result depends on
the seed and the number of ranks alone.

Knows nothing of files or layouts. mpi4py is imported by the caller's wish only. Paper: section 5.2,
Algorithm 1; section 6, MPI.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Callable

from rlhfuse.errors import InputError
from rlhfuse.schedule.chain import Chain, Found, Round, schedule_of
from rlhfuse.schedule.goal import Goal, Incumbent, reaches
from rlhfuse.schedule.graph import build_graph
from rlhfuse.schedule.paper_chain import PaperChain, PaperSettings, paper_starts
from rlhfuse.schedule.problem import FusionProblem, Number
from rlhfuse.schedule.schedule import Schedule
from rlhfuse.schedule.starts import starting_schedules

METHODS = ("default", "paper")
ROUND_MOVES = 200_000  # tried by a chain between two looks at the clock: a few hundredths of a second


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
    first_bound_seconds: float | None  # when the latency bound was reached
    seed: int
    ranks: int
    objective: str

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
    on_improved: Callable[[Schedule, SearchReport], None] | None = None,
    on_round: Callable[[SearchReport], None] | None = None,
) -> tuple[Schedule, SearchReport]:
    """Search until a proved optimum, `time_limit` seconds or `iterations` moves per rank.

    `objective` and `latency` are those of `goal.Goal`. `memory_cap` replaces the problem's cap (static
    memory still counts); `start` is a schedule to improve on; `comm` is an mpi4py communicator; `method` is
    the project's own search or the paper's, whose settings are `paper`. The callbacks run on rank 0. All
    ranks return the same schedule, never slower than greedy unless greedy breaks the cap. KeyboardInterrupt
    passes through. Raises InputError on settings out of range and on a cap that no schedule meets.
    """
    _check_settings(time_limit, iterations, seed, memory_cap)
    if method not in METHODS:
        raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")
    started = time.monotonic()
    if memory_cap is not None:
        problem = replace(problem, memory_cap=memory_cap)
    graph, goal = build_graph(problem), Goal(problem, objective, latency)
    starts = paper_starts(problem, start) if method == "paper" else starting_schedules(problem, start)
    best = min((entry for entry in starts if entry.fits()), key=lambda entry: goal.key(entry.timeline))
    rank, ranks = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)
    clock = _Clock(started, time_limit, iterations)
    if method == "paper":
        chain: Chain | PaperChain = PaperChain(graph, goal, starts, seed, rank, paper)
    else:
        chain = Chain(graph, goal, starts, seed, rank)
    first_bound: float | None = None
    moves = accepted = 0

    def report() -> SearchReport:
        makespan, peak = best.timeline.makespan, best.timeline.peak_memory
        return SearchReport(
            makespan,
            goal.latency_bound,
            peak,
            goal.memory_bound(makespan),
            moves,
            accepted,
            time.monotonic() - started,
            first_bound,
            seed,
            ranks,
            objective,
        )

    if on_improved and rank == 0:
        on_improved(best.schedule, report())
    while True:
        if first_bound is None and reaches(best.timeline.makespan, goal.latency_bound):
            first_bound = time.monotonic() - started
        share = _agree(comm, clock.share())  # the clock differs between ranks; what follows from it must not
        if goal.reached(best.timeline) or share >= 1:
            break
        done = chain.round(best, min(ROUND_MOVES, clock.moves_left()), share)
        clock.moves += done.tried
        tried, found, kept = _exchange(comm, done)
        moves += tried
        accepted += kept
        if found is not None:
            candidate = Incumbent.of(schedule_of(graph, found.sequence))
            if goal.key(candidate.timeline) < goal.key(best.timeline):
                best = candidate
                if on_improved and rank == 0:
                    on_improved(best.schedule, report())
        if on_round and rank == 0:
            on_round(report())
    return best.schedule, report()


class _Clock:
    """How much of the budget is spent: seconds since the start, or this rank's moves."""

    def __init__(self, started: float, time_limit: float | None, iterations: int | None) -> None:
        self.started, self.time_limit, self.iterations = started, time_limit, iterations
        self.moves = 0

    def share(self) -> float:
        spent = (time.monotonic() - self.started) / self.time_limit if self.time_limit else 0.0
        return max(spent, self.moves / self.iterations if self.iterations else 0.0)

    def moves_left(self) -> int:
        return self.iterations - self.moves if self.iterations is not None else ROUND_MOVES


def _exchange(comm: Any, done: Round) -> Round:
    """Moves of all ranks, and the best of what they found (of equals the lowest rank's): the same on every rank."""
    if comm is None:
        return done
    answers = comm.allgather(done)
    improvements = [answer.found for answer in answers if answer.found is not None]
    return Round(
        sum(answer.tried for answer in answers),
        min(improvements, key=lambda found: found[:2], default=None),
        sum(answer.accepted for answer in answers),
    )


def _agree(comm: Any, value: float) -> float:
    """Rank 0's value on every rank."""
    return value if comm is None else comm.bcast(value, root=0)


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
