"""When every instruction of a step runs if its actions take the times given: what a measured run is held against.

F, B, W begin when the rank is free and the neighbouring stage has computed what they need, TE and ST when all ranks of
the collective have come to them. RG takes its time on its rank (the sum is waited for at the ST); transfers occupy
none. Where evaluate.py prices a schedule of nodes, here every rank has a row of its own and the weights' instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from rlhfuse.base.errors import ScheduleError
from rlhfuse.schedule.ir.action import COMPUTE, RECEIVE_OF, Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.program.program import Program

COLLECTIVES = (Kind.TE, Kind.ST)


class TimedAction(NamedTuple):
    """One instruction that takes time, in the unit of the times given, from the step's beginning."""

    action: Action
    start: float
    end: float


def program_times(
    programs: Mapping[int, Program], ranks: FusedRanks, seconds: Callable[[Action], float], transfer: float = 0
) -> dict[int, tuple[TimedAction, ...]]:
    """Start and end of all that each rank does but transfers, in program order; what comes from another node is there
    `transfer` after it was computed. Raises ScheduleError on deadlock."""
    clock = _Clock(programs, ranks, seconds, transfer)
    while any([clock.advance(rank) for rank in programs]):  # every rank gets its turn in every sweep
        pass
    clock.check_finished()
    return {rank: tuple(rows) for rank, rows in clock.rows.items()}


def makespan(times: Mapping[int, tuple[TimedAction, ...]]) -> float:
    """When the last rank is done."""
    return max((timed.end for rows in times.values() for timed in rows), default=0.0)


class _Clock:
    """Advances all programs at once."""

    def __init__(
        self, programs: Mapping[int, Program], ranks: FusedRanks, seconds: Callable[[Action], float], transfer: float
    ) -> None:
        self.rows: dict[int, list[TimedAction]] = {rank: [] for rank in programs}
        self._programs, self._ranks, self._seconds, self._transfer = programs, ranks, seconds, transfer
        self._models = {name: share.model for share in ranks.shape.shares for name in share.names}
        self._position = dict.fromkeys(programs, 0)
        self._now = dict.fromkeys(programs, 0.0)
        self._ends: dict[tuple[int, Action], float] = {}
        every = [(rank, instruction) for rank, program in programs.items() for instruction in program.instructions]
        self._sources = {(rank, i.action): i.peer for rank, i in every}
        self._sizes = Counter(self._collective(rank, i.action) for rank, i in every if i.action.kind in COLLECTIVES)
        self._there: dict[Hashable, dict[tuple[int, Action], float]] = {}

    def _collective(self, rank: int, action: Action) -> Hashable:
        """Equal for all that take part in one TE or ST."""
        model = self._models[action.pipeline]
        if action.kind is Kind.ST:
            return model
        return model, self._ranks.replica_of(rank), action.pipeline, self._ranks.locate(model, rank)[2]

    def advance(self, rank: int) -> bool:
        """Go on until something is waited for; whether anything was done."""
        instructions, first = self._programs[rank].instructions, self._position[rank]
        while self._position[rank] < len(instructions):
            action = instructions[self._position[rank]].action
            if action.kind in COMPUTE or action.kind in COLLECTIVES or action.kind is Kind.RG:
                ready = self._ready(rank, action)
                if ready is None:
                    break
                start = max(self._now[rank], ready)
                self._now[rank] = self._ends[rank, action] = start + self._seconds(action)
                self.rows[rank].append(TimedAction(action, start, self._now[rank]))
            self._position[rank] += 1
        return self._position[rank] > first

    def _ready(self, rank: int, action: Action) -> float | None:
        """When what the action needs from other ranks is there; None while that is not known."""
        if action.kind in COLLECTIVES:
            collective = self._collective(rank, action)
            there = self._there.setdefault(collective, {})
            there[rank, action] = self._now[rank]
            return max(there.values()) if len(there) == self._sizes[collective] else None
        source = None
        if action.kind in RECEIVE_OF:
            source = self._sources.get((rank, action._replace(kind=RECEIVE_OF[action.kind])))
        if source is None:  # whatever is needed was computed on this rank, before
            return 0.0
        step = -1 if action.kind is Kind.F else 1
        end = self._ends.get((source, action._replace(stage=action.stage + step)))
        lag = self._transfer if self._ranks.node_of(source) != self._ranks.node_of(rank) else 0
        return None if end is None else end + lag

    def check_finished(self) -> None:
        for rank, position in self._position.items():
            instructions = self._programs[rank].instructions
            if position < len(instructions):
                raise ScheduleError(f"rank {rank}, position {position}: {instructions[position]} never begins")
