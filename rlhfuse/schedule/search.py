"""Finds a fused schedule: annealing from several starts, alone or on every rank of an MPI job.

The schedules made by rule stand at once as the first incumbent. Then every MPI rank runs its own chain
of annealing runs (own random stream, own starts); after every round of a fixed number of moves the
ranks exchange improvements in one collective, so that all hold the same incumbent and stop together:
at a proved bound, at the time limit or at the number of moves. With `iterations` instead of a time
limit the result depends on the seed and the number of ranks alone.

    latency   least makespan; stops at the latency lower bound
    memory    the same, then the least peak memory at that makespan: the cap is lowered step by step
              and a run succeeds when it is as fast under the lower cap; stops at the memory bound

Knows nothing of files or layouts. mpi4py is imported by the caller's wish only. Paper: section 5.2,
Algorithm 1 and "Optimizing memory usage".
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np

from rlhfuse.errors import InputError
from rlhfuse.schedule.action import Kind
from rlhfuse.schedule.anneal import Rule, Tables, anneal, new_state
from rlhfuse.schedule.bounds import latency_bound, memory_bound
from rlhfuse.schedule.builders import capped_greedy, greedy, pipeline_work, serial_1f1b
from rlhfuse.schedule.evaluate import TOLERANCE, Timeline, evaluate
from rlhfuse.schedule.graph import OperationGraph, build_graph
from rlhfuse.schedule.problem import FusionProblem, Number
from rlhfuse.schedule.schedule import Schedule

OBJECTIVES = ("latency", "memory")
ROUND_MOVES = 200_000  # tried by a chain between two looks at the clock: a few hundredths of a second
FIRST_RUN_MOVES_PER_OPERATION = 400  # doubled from run to run, up to the next
LAST_RUN_MOVES_PER_OPERATION = 25_600
# Micro-batches above 1F1B's caps, for the largest model and for the others, of the schedules to start from.
START_EXTRAS = ((-1, 0), (0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (4, 4), (0, 4), (0, 8), (4, 8))
CAP_STEPS = (0.3, 0.12, 0.04, 0.0)  # how far from the incumbent towards the bound the next cap is; 0: just below it


@dataclass(frozen=True)
class SearchReport:
    """Where a search stands, in the problem's units; `moves` counts tried swaps over all ranks."""

    makespan: Number
    lower_bound: Number
    peak_memory: Number
    memory_lower_bound: Number
    moves: int
    seconds: float
    first_bound_seconds: float | None  # when the latency bound was reached
    seed: int
    ranks: int
    objective: str

    @property
    def optimal(self) -> bool:
        """Whether the makespan is proved to be the least possible."""
        return _reaches(self.makespan, self.lower_bound)


@dataclass(frozen=True)
class Incumbent:
    """The best schedule so far; compared by (makespan, peak memory)."""

    schedule: Schedule
    timeline: Timeline

    @property
    def key(self) -> tuple[Number, Number]:
        return self.timeline.makespan, self.timeline.peak_memory


def search(
    problem: FusionProblem,
    *,
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 1,
    objective: str = "latency",
    memory_cap: float | None = None,
    start: Schedule | None = None,
    comm: Any = None,
    on_improved: Callable[[Schedule, SearchReport], None] | None = None,
    on_round: Callable[[SearchReport], None] | None = None,
) -> tuple[Schedule, SearchReport]:
    """Search until a proved optimum, `time_limit` seconds or `iterations` moves per rank.

    `memory_cap` replaces the problem's cap (static memory still counts); `start` is a schedule to
    improve on; `comm` is an mpi4py communicator. The callbacks run on rank 0. All ranks return the same
    schedule, never slower than greedy unless greedy breaks the cap. KeyboardInterrupt passes through.
    Raises InputError on settings out of range and on a cap that no schedule meets.
    """
    _check_settings(time_limit, iterations, seed, objective, memory_cap)
    started = time.monotonic()
    if memory_cap is not None:
        problem = FusionProblem(problem.nodes, problem.pipelines, problem.transfer, memory_cap, problem.static_memory)
    graph = build_graph(problem)
    starts = starting_schedules(problem, start)
    best = min(filter(fits, starts), key=lambda entry: entry.key)
    rank, ranks = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)
    clock = _Clock(started, time_limit, iterations)
    chain = _Chain(graph, starts, seed, rank)
    bound = latency_bound(problem)
    first_bound: float | None = None
    moves = 0

    def report() -> SearchReport:
        makespan, peak = best.key
        least = memory_bound(problem, makespan)
        return SearchReport(
            makespan, bound, peak, least, moves, time.monotonic() - started, first_bound, seed, ranks, objective
        )

    if on_improved and rank == 0:
        on_improved(best.schedule, report())
    while True:
        if first_bound is None and _reaches(best.key[0], bound):
            first_bound = time.monotonic() - started
        polish = objective == "memory" and (first_bound is not None or clock.share() > 0.5)
        if _proved(problem, best, bound, objective) or _agree(comm, clock.over()):
            break
        # The clock differs between ranks; the phase must not.
        tried, found = chain.round(best, bound, _agree(comm, polish), clock.moves_left())
        clock.moves += tried
        tried, found = _exchange(comm, tried, found)
        moves += tried
        if found is not None:
            candidate = _incumbent(graph, found.sequence)
            if candidate.key < best.key:
                best = candidate
                if on_improved and rank == 0:
                    on_improved(best.schedule, report())
        if on_round and rank == 0:
            on_round(report())
    return best.schedule, report()


def starting_schedules(problem: FusionProblem, start: Schedule | None = None) -> list[Incumbent]:
    """The schedules made by rule (and `start`), without repetition; at least one fits the caps.

    Raises InputError naming the cap when not even one micro-batch at a time fits.
    """
    made = [greedy(problem), serial_1f1b(problem)]
    for extras in START_EXTRAS:
        extra = {model: extras[min(i, 1)] for i, model in enumerate(_by_size(problem))}
        made += [capped_greedy(problem, extra, model_first=model_first) for model_first in (False, True)]
    if start is not None:
        made.insert(0, Schedule(problem, start.orders))
    entries = [Incumbent(schedule, evaluate(schedule)) for schedule in dict.fromkeys(made)]
    for in_flight in range(max(pipeline.stages for pipeline in problem.pipelines), 0, -1):
        if any(map(fits, entries)):
            return entries
        schedule = serial_1f1b(problem, in_flight)
        entries.append(Incumbent(schedule, evaluate(schedule)))
    last = entries[-1]
    if not fits(last):
        node = max(range(problem.nodes), key=lambda n: last.timeline.node_peak_memory[n] - problem.node_cap(n))
        raise InputError(
            f"memory cap leaves {problem.node_cap(node):g} for activations on node {node}, but one micro-batch at a "
            f"time needs {last.timeline.node_peak_memory[node]}; raise the cap"
        )
    return entries


def _by_size(problem: FusionProblem) -> list[str]:
    """Model names, the largest first."""
    size = {pipeline.model: pipeline_work(pipeline) for pipeline in problem.pipelines}
    return sorted(size, key=lambda model: -size[model])


def fits(entry: Incumbent) -> bool:
    """Whether every node stays within its cap."""
    problem, peaks = entry.schedule.problem, entry.timeline.node_peak_memory
    return all(peak <= _loosen(problem.node_cap(node)) for node, peak in enumerate(peaks))


class Found(NamedTuple):
    """What a chain offers as a better schedule; `sequence` as in `anneal.State`."""

    makespan: float
    peak_memory: float
    sequence: np.ndarray


class _Clock:
    """How much of the budget is spent: seconds since the start, or this rank's moves."""

    def __init__(self, started: float, time_limit: float | None, iterations: int | None) -> None:
        self.started, self.time_limit, self.iterations = started, time_limit, iterations
        self.moves = 0

    def share(self) -> float:
        spent = (time.monotonic() - self.started) / self.time_limit if self.time_limit else 0.0
        return max(spent, self.moves / self.iterations if self.iterations else 0.0)

    def over(self) -> bool:
        return self.share() >= 1

    def moves_left(self) -> int:
        return self.iterations - self.moves if self.iterations is not None else ROUND_MOVES


class _Chain:
    """One rank's annealing runs, one after the other; each run is cut into rounds."""

    def __init__(self, graph: OperationGraph, starts: list[Incumbent], seed: int, rank: int) -> None:
        self.graph = graph
        self.tables = tables_of(graph)
        self.starts = starts
        self.seed, self.rank = seed, rank
        self.runs = 0
        self.length, self.left = 0, 0  # moves of the present run, and how many of them are to come
        self.goal: tuple | None = None  # what the present run is after; a new incumbent ends it
        self.step = rank % len(CAP_STEPS)
        self.unit = float(np.mean([graph.duration[lane.first] for lane in graph.lanes if lane.kind is Kind.F]))

    def round(self, best: Incumbent, bound: Number, polish: bool, moves_left: int) -> tuple[int, Found | None]:
        """Anneal one round; returns (moves tried, something better than `best` or None)."""
        goal = (polish, best.key)
        if self.left <= 0 or goal != self.goal:
            if goal == self.goal:  # the run found nothing: ask for less
                self.step = (self.step + 1) % len(CAP_STEPS)
            self.goal = goal
            self._begin(best, polish)
        moves = min(ROUND_MOVES, self.left, moves_left)
        done = self.length - self.left
        found = np.empty(self.graph.size, np.int64)
        target, fastest = self._ask(best, bound, polish)
        rule = Rule(
            cap=self._cap(best, polish),
            penalty=0.75 * self.unit,
            free_share=0.15 if self.runs % 3 else 0.04,
            target=target,
            epsilon=min(1e-9 * float(best.key[0]), float(self.graph.duration.min()) / 4),
        )
        warm, cold = self._temperature(done), self._temperature(done + moves)
        tried, reached, _ = anneal(self.tables, self.state, rule, moves, warm, cold, found, fastest)
        tried = max(tried, 1)
        self.left -= tried
        return tried, Found(reached, _peak(self.tables, found), found) if reached < fastest else None

    def _begin(self, best: Incumbent, polish: bool) -> None:
        """Start the next run: in turn from the incumbent and from the schedules made by rule that suit the cap."""
        turn = self.runs + self.rank
        self.runs += 1
        cap = self._cap(best, polish)
        ranked = sorted(self.starts, key=lambda entry: _promise(entry, cap))
        entry = ranked[(turn // 2) % min(6, len(ranked))]
        if turn % 2 and (polish or self.runs > 4):
            entry = best
        per_operation = FIRST_RUN_MOVES_PER_OPERATION * 2 ** (self.runs // 4)
        self.length = self.left = self.graph.size * min(per_operation, LAST_RUN_MOVES_PER_OPERATION)
        self.warm = self.unit * (0.3, 0.6)[turn % 2]
        self.state = new_state(sequence_of(self.graph, entry.schedule), hash_seed(self.seed, self.rank, self.runs))

    def _cap(self, best: Incumbent, polish: bool) -> np.ndarray:
        """Activation memory allowed on each node; when polishing, a step from the incumbent to the bound."""
        problem = self.graph.problem
        caps = _loosen(np.array([problem.node_cap(node) for node in range(problem.nodes)]))
        if not polish:
            return caps
        makespan, peak = (float(value) for value in best.key)
        wanted = peak - (peak - float(memory_bound(problem, makespan))) * CAP_STEPS[self.step]
        return np.minimum(caps, min(_loosen(wanted), peak * (1 - 2 * TOLERANCE)))

    def _ask(self, best: Incumbent, bound: Number, polish: bool) -> tuple[float, float]:
        """(makespan to stop at, makespan to beat)."""
        makespan = float(best.key[0])
        return (makespan, makespan * (1 + 4 * TOLERANCE)) if polish else (float(bound), makespan)

    def _temperature(self, done: int) -> float:
        """From `warm` down to a fifteenth of it over a run."""
        return self.warm * 15.0 ** (-done / self.length)


def _promise(entry: Incumbent, cap: np.ndarray) -> float:
    """How good a start is under `cap`, smaller is better: its makespan, longer by the share it is above the cap."""
    above = max(peak / limit - 1 for peak, limit in zip(entry.timeline.node_peak_memory, cap) if limit > 0)
    return entry.timeline.makespan * (1 + max(0.0, above))


def tables_of(graph: OperationGraph) -> Tables:
    """The graph as the annealer takes it."""
    counts = np.bincount(graph.node, minlength=graph.problem.nodes)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Tables(
        graph.node, graph.lane, graph.duration, graph.upstream, graph.lag, graph.downstream, graph.memory, first
    )


def sequence_of(graph: OperationGraph, schedule: Schedule) -> np.ndarray:
    """Operation numbers node by node; `_incumbent` is the inverse."""
    return np.array([graph.number[action] for order in schedule.orders for action in order], np.int64)


def hash_seed(*parts: int) -> int:
    """One 64-bit seed out of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _incumbent(graph: OperationGraph, sequence: np.ndarray) -> Incumbent:
    rows: list[list] = [[] for _ in range(graph.problem.nodes)]
    for operation in sequence.tolist():
        rows[graph.node[operation]].append(graph.actions[operation])
    schedule = Schedule(graph.problem, tuple(tuple(row) for row in rows))
    return Incumbent(schedule, evaluate(schedule))


def _exchange(comm: Any, tried: int, found: Found | None) -> tuple[int, Found | None]:
    """Moves of all ranks, and the best of what they found (of equals the lowest rank's): the same on every rank."""
    if comm is None:
        return tried, found
    answers = comm.allgather((tried, found))
    improvements = [answer for _, answer in answers if answer is not None]
    return sum(count for count, _ in answers), min(improvements, key=lambda f: f[:2], default=None)


def _peak(tables: Tables, sequence: np.ndarray) -> float:
    """Peak activation memory over all nodes."""
    rows = zip(tables.first, tables.first[1:])
    return max(float(np.cumsum(tables.memory[sequence[a:b]]).max(initial=0.0)) for a, b in rows)


def _agree(comm: Any, decision: bool) -> bool:
    """Rank 0's decision on every rank."""
    return decision if comm is None else comm.bcast(decision, root=0)


def _proved(problem: FusionProblem, best: Incumbent, bound: Number, objective: str) -> bool:
    if not _reaches(best.key[0], bound):
        return False
    return objective == "latency" or _reaches(best.key[1], memory_bound(problem, best.key[0]))


def _reaches(value: Number, bound: Number) -> bool:
    return value <= bound * (1 + TOLERANCE)


def _loosen(cap: Any) -> Any:
    """A cap with room for the rounding of sums."""
    return cap * (1 + TOLERANCE) + 1e-12


def _check_settings(
    time_limit: float | None, iterations: int | None, seed: int, objective: str, memory_cap: float | None
) -> None:
    if time_limit is None and iterations is None:
        raise InputError("the search has no end: give time_limit (seconds) or iterations (moves)")
    for name, value in (("time_limit", time_limit), ("iterations", iterations), ("memory_cap", memory_cap)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name}={value} must be above 0")
    if seed < 0:
        raise InputError(f"seed={seed} must be at least 0")
    if objective not in OBJECTIVES:
        raise InputError(f"objective={objective!r} must be one of {', '.join(OBJECTIVES)}")


def world_communicator() -> Any:
    """MPI's world communicator. Raises InputError when mpi4py or an MPI library is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(f"started under mpirun but MPI cannot be loaded ({error}); pip install rlhfuse[mpi]") from None
    return MPI.COMM_WORLD
