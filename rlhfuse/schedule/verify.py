"""Runs lowered programs symbolically and refuses any that could hang, starve or compute the wrong thing.

Semantics are the strictest that a backend may have: a transfer happens only when the sender stands at
its send and the receiver stands at the matching receive (rendezvous), and every rank does its
instructions strictly in order, so each communicator sees them in issue order. Programs that pass
here run under any looser semantics (asynchronous sends, receives posted ahead).

It shares no code with lowering.py but the instruction type: what must be true is derived from the
rank map alone. Knows nothing of times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

from rlhfuse.errors import ScheduleError
from rlhfuse.schedule.action import Action, Kind
from rlhfuse.schedule.lowering import Instruction, Program
from rlhfuse.schedule.ranks import FusedRanks
from rlhfuse.schedule.schedule import Schedule

_SENDS = (Kind.SF, Kind.SB)
_RECEIVES = (Kind.RF, Kind.RB)


@dataclass
class _Rank:
    """A rank on its way through its program, and what it holds."""

    program: Program
    replica: int
    position: int = 0
    done: set[Action] = field(default_factory=set)

    @property
    def head(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None

    def finish(self) -> None:
        self.done.add(self.head.action)
        self.position += 1


def verify(programs: Mapping[int, Program], schedule: Schedule, ranks: FusedRanks) -> int:
    """Execute `programs` to the end; returns the number of transfers.

    Raises ScheduleError naming rank, position and instruction, with the grid, on: a rank without its
    program, compute that differs from its node's order, an input used before it is there, a transfer
    missing, repeated or with the wrong peer, a pair that disagrees on what is next, and a deadlock.
    """
    owners = _owners(ranks)
    if set(programs) != {rank for rank, _ in owners}:
        raise ScheduleError(f"programs are for ranks {sorted(programs)}, the layout has {[rank for rank, _ in owners]}")
    _check_compute(programs, schedule, ranks)
    states = {rank: _Rank(programs[rank], replica) for rank, replica in owners}
    transfers = 0
    ready = sorted(states)
    while ready:
        rank = ready.pop()
        state = states[rank]
        while state.head is not None:
            peer = _step(state, states, ranks, programs)
            if peer is None:
                break
            if peer != rank:
                transfers += 1
                ready.append(peer)
    _check_finished(states, programs)
    _check_nothing_unsent(states, ranks, programs)
    return transfers


def _step(state: _Rank, states: Mapping[int, _Rank], ranks: FusedRanks, programs: Mapping[int, Program]) -> int | None:
    """Do the head of `state` if it can be done: its own rank when computing, the peer of a transfer, else None."""
    instruction = state.head
    rank, kind = state.program.rank, instruction.action.kind
    if instruction.action in state.done:
        raise _error(programs, rank, state.position, "is done twice")
    if kind in _SENDS or kind in _RECEIVES:
        _check_transfer(state, ranks, programs)
        other = states[instruction.peer]
        if other.head is None or other.head.peer != rank or (other.head.action.kind in _SENDS) == (kind in _SENDS):
            return None
        if other.head.action != _mirror(instruction.action):
            raise _error(programs, rank, state.position, f"meets {other.head} on rank {instruction.peer}")
        state.finish()
        other.finish()
        return instruction.peer
    needed = _input_of(state, ranks)
    if needed is not None and needed not in state.done:
        raise _error(programs, rank, state.position, f"runs before {needed}")
    state.finish()
    return rank


def _input_of(state: _Rank, ranks: FusedRanks) -> Action | None:
    """What must have happened on this rank before its head can compute."""
    action, rank = state.head.action, state.program.rank
    stages = ranks.stages(state.replica, action.pipeline)
    if action.kind is Kind.W:
        return action._replace(kind=Kind.B)
    if action.kind is Kind.F:
        if action.stage == 0:
            return None
        local = rank in stages[action.stage - 1]
        return action._replace(stage=action.stage - 1) if local else action._replace(kind=Kind.RF)
    if action.stage == len(stages) - 1:
        return action._replace(kind=Kind.F)
    local = rank in stages[action.stage + 1]
    return action._replace(stage=action.stage + 1) if local else action._replace(kind=Kind.RB)


def _mirror(action: Action) -> Action:
    """The other end of a transfer."""
    step = {Kind.SF: 1, Kind.RF: -1, Kind.SB: -1, Kind.RB: 1}[action.kind]
    kind = {Kind.SF: Kind.RF, Kind.RF: Kind.SF, Kind.SB: Kind.RB, Kind.RB: Kind.SB}[action.kind]
    return action._replace(stage=action.stage + step, kind=kind)


def _check_transfer(state: _Rank, ranks: FusedRanks, programs: Mapping[int, Program]) -> None:
    """The peer must hold the other end, and a send must have something to send."""
    instruction, rank = state.head, state.program.rank
    action, other = instruction.action, _mirror(instruction.action)
    stages = ranks.stages(state.replica, action.pipeline)
    if not (0 <= other.stage < len(stages) and 0 <= action.stage < len(stages)) or rank not in stages[action.stage]:
        raise _error(programs, rank, state.position, "has no stage to talk to")
    peer = stages[other.stage][stages[action.stage].index(rank)]
    if instruction.peer != peer:
        raise _error(programs, rank, state.position, f"has the wrong peer: stage {other.stage} is on rank {peer}")
    if action.kind in _SENDS:
        computed = action._replace(kind=Kind.F if action.kind is Kind.SF else Kind.B)
        if computed not in state.done:
            raise _error(programs, rank, state.position, f"sends before {computed}")


def _check_compute(programs: Mapping[int, Program], schedule: Schedule, ranks: FusedRanks) -> None:
    """A rank computes exactly its node's order, each action on the sub-stages that it holds."""
    for replica, pipelines in enumerate(ranks.replicas):
        wanted: dict[int, list[Action]] = {rank: [] for rank in programs}
        for order in schedule.orders:
            for action in order:
                for i, group in _in_data_order(pipelines[action.pipeline][action.stage], action.kind):
                    for rank in group:
                        wanted[rank].append(
                            action._replace(stage=action.stage * ranks.merge(action.pipeline) + i)
                        )
        for rank, actions in wanted.items():
            if not actions:
                continue
            found = [(p, i.action) for p, i in enumerate(programs[rank].instructions) if i.peer is None]
            for (position, action), expected in zip(found, actions):
                if action != expected:
                    raise _error(programs, rank, position, f"stands where the schedule has {expected}")
            if len(found) != len(actions):
                raise ScheduleError(
                    f"rank {rank} computes {len(found)} actions, its node's order has {len(actions)}",
                    _grid(programs),
                )


def _in_data_order(substages: tuple[tuple[int, ...], ...], kind: Kind) -> list[tuple[int, tuple[int, ...]]]:
    numbered = list(enumerate(substages))
    return numbered if kind is Kind.F else numbered[::-1]


def _check_finished(states: Mapping[int, _Rank], programs: Mapping[int, Program]) -> None:
    stuck = [state for state in states.values() if state.head is not None]
    if not stuck:
        return
    waits = [f"rank {s.program.rank} at {s.position} waits in {s.head}" for s in stuck]
    error = _error(programs, stuck[0].program.rank, stuck[0].position, f"never happens: {'; '.join(waits[:8])}")
    raise ScheduleError(f"deadlock: {error}", error.grid)


def _check_nothing_unsent(states: Mapping[int, _Rank], ranks: FusedRanks, programs: Mapping[int, Program]) -> None:
    """Every forward but the last stage's and every backward but the first's reaches the neighbour stage.

    A consumer that lacks its input was caught on the way; this catches an output that nobody consumes.
    """
    for rank, state in states.items():
        for action in state.done:
            step = {Kind.F: 1, Kind.B: -1}.get(action.kind)
            if step is None:
                continue
            stages = ranks.stages(state.replica, action.pipeline)
            target = action.stage + step
            if not 0 <= target < len(stages) or rank in stages[target]:
                continue
            sent = action._replace(kind=Kind.SF if action.kind is Kind.F else Kind.SB)
            if sent not in state.done:
                raise ScheduleError(f"rank {rank}: {action} is never sent", _grid(programs))


def _owners(ranks: FusedRanks) -> list[tuple[int, int]]:
    """(rank, replica) of every rank, each once."""
    owners = {
        (rank, replica)
        for replica, pipelines in enumerate(ranks.replicas)
        for name in pipelines
        for stage in ranks.stages(replica, name)
        for rank in stage
    }
    return sorted(owners)


def _error(programs: Mapping[int, Program], rank: int, position: int, what: str) -> ScheduleError:
    instruction = programs[rank].instructions[position]
    return ScheduleError(f"rank {rank}, position {position}: {instruction} {what}", _grid(programs, rank, position))


def _grid(programs: Mapping[int, Program], rank: int | None = None, position: int = 0) -> str:
    lines = []
    for number, program in sorted(programs.items()):
        words = [str(instruction) for instruction in program.instructions]
        if number == rank:
            words.insert(position + 1, "<-- ERROR HERE")
        lines.append(f"rank {number}: {' '.join(words)}")
    return "\n".join(lines)
