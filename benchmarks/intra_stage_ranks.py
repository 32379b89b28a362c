"""What a rank of the intra-stage benchmark answers.

This file does without torch, so that the benchmark itself starts at once and stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Action:
    """A computing action of one rank, in seconds of its clock."""

    rank: int
    text: str  # actor:0F1
    key: tuple[str, int, str]  # model, stage, kind
    start: float
    end: float


@dataclass(frozen=True)
class Spent:
    """Where a rank's executor spent the time of instructions of one kind, in seconds."""

    count: int
    transport: float  # in the calls that start sends and receives
    waiting: float  # for inputs and reductions
    overhead: float  # in the executor itself


@dataclass(frozen=True)
class Run:
    """What one rank did in one run of a side; of Megatron's own loop only the times of the whole are known."""

    start: float
    end: float
    cpu_seconds: float  # of the thread that computes
    page_faults: int
    actions: tuple[Action, ...] = ()
    spent: tuple[tuple[str, Spent], ...] = ()  # by kind of instruction; a kind may come once for each phase
    drain_seconds: float = 0.0  # waited at the end until the last sends were received
    peak_live: int = 0  # most micro-batches kept for their backward

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def busy_seconds(self) -> float:
        return sum(action.end - action.start for action in self.actions)


@dataclass(frozen=True)
class Round:
    """One run of a side over all ranks; the actions' times count from its start."""

    seconds: float
    actions: tuple[Action, ...]
    runs: tuple[Run, ...]  # by rank

    @staticmethod
    def of(runs: Sequence[Run]) -> Round:
        start = min(run.start for run in runs)
        actions = tuple(
            replace(action, start=action.start - start, end=action.end - start)
            for run in runs
            for action in run.actions
        )
        return Round(max(run.end for run in runs) - start, actions, tuple(runs))
