"""One rank's chain of annealing runs: which start, which temperature, which memory cap, run after run.

A chain is asked for rounds of a few moves, so that its owner can look at the clock and at what other
chains have found between two of them. Until the incumbent is fast enough a run aims below its makespan;
after that a run aims at the same makespan under a lower memory cap, and succeeds when it gets there.

Knows nothing of clocks, MPI or files; the same seed and rank give the same runs. Paper: section 5.2,
"Optimizing memory usage".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhfuse.schedule.action import Kind
from rlhfuse.schedule.anneal import Rule, Tables, anneal, new_state
from rlhfuse.schedule.evaluate import TOLERANCE
from rlhfuse.schedule.goal import Goal, Incumbent, loosen
from rlhfuse.schedule.graph import OperationGraph
from rlhfuse.schedule.schedule import Schedule

FIRST_RUN_MOVES_PER_OPERATION = 400  # doubled from run to run, up to the next
LAST_RUN_MOVES_PER_OPERATION = 25_600
CAP_STEPS = (0.3, 0.12, 0.04, 0.0)  # how far from the incumbent towards the bound the next cap is; 0: just below it


class Found(NamedTuple):
    """A schedule better than the incumbent; `sequence` as in `anneal.State`."""

    makespan: float
    peak_memory: float
    sequence: np.ndarray


class Round(NamedTuple):
    """What a chain did: how many moves it tried and accepted, and the best it found if that beats the incumbent."""

    tried: int
    found: Found | None
    accepted: int = 0


class Chain:
    """One rank's annealing runs, one after the other; each run is cut into rounds."""

    def __init__(self, graph: OperationGraph, goal: Goal, starts: list[Incumbent], seed: int, rank: int) -> None:
        self.graph, self.goal = graph, goal
        self.tables = tables_of(graph)
        self.starts = starts
        self.seed, self.rank = seed, rank
        self.runs = 0
        self.length, self.left = 0, 0  # moves of the present run, and how many of them are to come
        self.aim: tuple | None = None  # what the present run is after; a new incumbent ends it
        self.step = rank % len(CAP_STEPS)
        self.unit = float(np.mean([graph.duration[lane.first] for lane in graph.lanes if lane.kind is Kind.F]))

    def round(self, best: Incumbent, moves: int, share: float) -> Round:
        """Try at most `moves` moves (at least 1) to beat `best`; `share` of the whole search is over (0 to 1)."""
        late = share > 0.5 and self.goal.latency is None
        polish = self.goal.objective == "memory" and (self.goal.fast_enough(best.timeline.makespan) or late)
        aim = (polish, self.goal.key(best.timeline))
        if self.left <= 0 or aim != self.aim:
            if aim == self.aim:  # the run found nothing: ask for less
                self.step = (self.step + 1) % len(CAP_STEPS)
            self.aim = aim
            self._begin(best, polish)
        moves = min(moves, self.left)
        done = self.length - self.left
        found = np.empty(self.graph.size, np.int64)
        target, fastest = self._ask(best, polish)
        rule = Rule(
            cap=self._cap(best, polish),
            penalty=0.75 * self.unit,
            free_share=0.15 if self.runs % 3 else 0.04,
            target=target,
            epsilon=min(1e-9 * float(best.timeline.makespan), float(self.graph.duration.min()) / 4),
        )
        warm, cold = self._temperature(done), self._temperature(done + moves)
        tried, reached, _ = anneal(self.tables, self.state, rule, moves, warm, cold, found, fastest)
        tried = max(tried, 1)
        self.left -= tried
        return Round(tried, Found(reached, peak_memory(self.tables, found), found) if reached < fastest else None)

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
        caps = np.array([loosen(problem.node_cap(node)) for node in range(problem.nodes)])
        if not polish:
            return caps
        makespan, peak = (float(value) for value in self.goal.key(best.timeline))
        wanted = peak - (peak - float(self.goal.memory_bound(makespan))) * CAP_STEPS[self.step]
        return np.minimum(caps, min(loosen(wanted), peak * (1 - 2 * TOLERANCE)))

    def _ask(self, best: Incumbent, polish: bool) -> tuple[float, float]:
        """(makespan to stop at, makespan to beat)."""
        makespan = float(self.goal.key(best.timeline)[0])
        return (makespan, makespan * (1 + 4 * TOLERANCE)) if polish else (float(self.goal.enough), makespan)

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
    """Operation numbers node by node; `schedule_of` is the inverse."""
    return np.array([graph.number[action] for order in schedule.orders for action in order], np.int64)


def schedule_of(graph: OperationGraph, sequence: np.ndarray) -> Schedule:
    """The schedule that a sequence stands for."""
    rows: list[list] = [[] for _ in range(graph.problem.nodes)]
    for operation in sequence.tolist():
        rows[graph.node[operation]].append(graph.actions[operation])
    return Schedule(graph.problem, tuple(tuple(row) for row in rows))


def peak_memory(tables: Tables, sequence: np.ndarray) -> float:
    """Peak activation memory over all nodes."""
    rows = zip(tables.first, tables.first[1:])
    return max(float(np.cumsum(tables.memory[sequence[a:b]]).max(initial=0.0)) for a, b in rows)


def hash_seed(*parts: int) -> int:
    """One 64-bit seed out of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
