"""Schedules as the annealers hold them: the operations' numbers, node by node, in execution order.

The one place that turns a `Schedule` into such a sequence and back, and the graph into the annealers'
tables. Knows nothing of search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.heads_tails import Tables


class Found(NamedTuple):
    """A schedule that a search has met; `sequence` as in `heads_tails.State`."""

    makespan: float
    peak_memory: float
    sequence: np.ndarray


class Round(NamedTuple):
    """What was done between two looks at the clock: moves tried, the best met if that beats the best known, and
    moves accepted."""

    tried: int
    found: Found | None
    accepted: int = 0


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


def node_peaks(tables: Tables, sequence: np.ndarray) -> list[float]:
    """Peak activation memory of every node."""
    rows = zip(tables.first, tables.first[1:])
    return [float(np.cumsum(tables.memory[sequence[a:b]]).max(initial=0.0)) for a, b in rows]


def hash_seed(*parts: int) -> int:
    """One 64-bit seed out of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
