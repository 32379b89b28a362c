"""Refuses programs that could hang, starve or compute the wrong thing, before the first byte is sent.

First each rank by itself: exactly its expected instructions, after what they depend on, in the order of its node and
under the memory cap. Then all ranks together, run symbolically in models of a machine (docs/explanation/programs.md):
*per communicator*, which must hold; *blocking receives*; and the strictest, *one queue* per rank. Shares no code with
lowering.py but the instruction type.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from rlhfuse.base.errors import ScheduleError
from rlhfuse.schedule.ir.action import COMPUTE, SENDS, Action
from rlhfuse.schedule.ir.evaluate import held_after, loosen
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.expected_instructions import Event, Expected, expected_instructions
from rlhfuse.schedule.program.program import Programs

NONE = -1


@dataclass(frozen=True)
class Verified:
    """What programs do, and whether they run on stricter machines too. A collective counts once for its group.

    `blocking_receives`: a rank may stand at each receive until its sender has begun to send; whatever the sender needs
    of this rank it had done before. `hang` says, where `one_queue` is False, how the programs would hang if every rank
    had one queue.
    """

    transfers: int
    collectives: int
    one_queue: bool
    hang: str = ""
    blocking_receives: bool = True


def verify(
    programs: Programs,
    schedule: Schedule,
    ranks: FusedRanks,
    *,
    tied: frozenset[str] = frozenset(),
    one_queue: bool = False,
) -> Verified:
    """Check `programs` against their schedule and run them symbolically in all models.

    `tied` names the models with tied embeddings. Raises ScheduleError naming rank, position and instruction, with the
    grid, unless every rank has the instructions that this schedule expects of it, and the model of one queue per
    communicator holds, or with `one_queue` that of one queue per rank.
    """
    if {*programs} != {*range(ranks.size)}:
        raise ScheduleError(f"programs are for ranks {[*programs]}, the layout has ranks 0-{ranks.size - 1}")
    with _collector_paused():
        steps = _check_ranks(programs, schedule, ranks, tied)
        clash = _first_clash(steps.issues)
        if clash:
            first, second = clash
            there = programs[second.rank].instructions[second.position]
            where = f"meets {there} at position {second.position} of rank {second.rank}"
            raise _error(programs, first.rank, first.position, where)
        halts, blocked, stricter = (_run(m, steps.sizes) for m in (steps.channels, steps.blocking, steps.one_queue))
        if halts := halts or (stricter if one_queue else []):
            hang = _error(programs, halts[0].rank, halts[0].position, _never(programs, halts))
            raise ScheduleError(f"deadlock: {hang}", hang.grid)
    transfers = sum(i.action.kind in SENDS for program in programs.values() for i in program.instructions)
    return Verified(transfers, steps.collectives, not stricter, _never(programs, stricter), not blocked)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Verification makes millions of small tuples, none in a cycle; walking them would be two thirds of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- every rank by itself


def _check_ranks(programs: Programs, schedule: Schedule, ranks: FusedRanks, tied: frozenset[str]) -> _Steps:
    """Check every rank by itself; returns the steps of all."""
    rows = _rows(schedule, ranks)
    steps = _Steps()
    for rank, program in sorted(programs.by_rank.items()):
        expected = expected_instructions(rank, schedule, ranks, tied)
        actions = [instruction.action for instruction in program.instructions]
        _check_expected(programs, rank, actions, expected)
        computed = [(position, action) for position, action in enumerate(actions) if action.kind in COMPUTE]
        for (position, action), wanted in zip(computed, rows[rank]):
            if action != wanted:
                raise _error(programs, rank, position, f"stands where the schedule has {wanted}")
        _check_memory(programs, rank, computed, schedule, ranks)
        steps.add(rank, [expected[action] for action in actions])
    return steps


def _check_expected(
    programs: Programs, rank: int, actions: Sequence[Action], expected: Mapping[Action, Expected]
) -> None:
    """The program holds every expected instruction once, with its peer and after what it depends on, and no other."""
    at: dict[Action, int] = {}
    for position, action in enumerate(actions):
        if at.setdefault(action, position) != position:
            raise _error(programs, rank, position, f"is done twice, first at position {at[action]}")
    for position, (instruction, action) in enumerate(zip(programs[rank].instructions, actions)):
        wanted = expected.get(action)
        if wanted is None:
            raise _error(programs, rank, position, "has no place here: this rank holds no such stage or micro-batch")
        if instruction.peer != wanted.peer:
            raise _error(programs, rank, position, f"has the wrong peer: the other end is on rank {wanted.peer}")
        for needed in wanted.after:
            if at.get(needed, position) >= position:
                raise _error(programs, rank, position, f"runs before {needed}")
    for action in expected:
        if action not in at:
            raise ScheduleError(
                f"rank {rank}, position {len(actions)}: the program ends and {action} is missing",
                programs.grid(rank, len(actions)),
            )


def _rows(schedule: Schedule, ranks: FusedRanks) -> dict[int, list[Action]]:
    """What every rank computes, in the order of its node, each action on the sub-stages that it holds."""
    rows: dict[int, list[Action]] = {rank: [] for rank in range(ranks.size)}
    for order in schedule.orders:
        for action in order:
            merge = ranks.merge(action.pipeline)
            for pipelines in ranks.replicas:
                for i, cell in enumerate(pipelines[action.pipeline][action.stage]):
                    real = action._replace(stage=action.stage * merge + i)
                    for rank in cell:
                        rows[rank].append(real)
    return rows


def _check_memory(
    programs: Programs, rank: int, computed: Sequence[tuple[int, Action]], schedule: Schedule, ranks: FusedRanks
) -> None:
    """Activations from F to B, and what W needs of them from B to W, stay under the cap of the rank's node."""
    cap = schedule.problem.node_cap(ranks.node_of(rank))
    if cap == math.inf:
        return
    pipelines = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}
    merged = [action._replace(stage=action.stage // ranks.merge(action.pipeline)) for _, action in computed]
    for (position, _), total in zip(computed, held_after(pipelines, merged)):
        if total > loosen(cap):
            raise _error(programs, rank, position, f"brings the activations to {total:g}, over the memory cap {cap:g}")


def _never(programs: Programs, halts: Sequence[Halt]) -> str:
    """Where ranks wait for ever; empty when none does."""
    waits = [f"rank {h.rank} at {h.position} waits in {programs[h.rank].instructions[h.position]}" for h in halts]
    more = f"; and {len(waits) - 8} more ranks" if len(waits) > 8 else ""
    return f"never happens: {'; '.join(waits[:8])}{more}" if waits else ""


def _error(programs: Programs, rank: int, position: int, what: str) -> ScheduleError:
    instruction = programs[rank].instructions[position]
    return ScheduleError(f"rank {rank}, position {position}: {instruction} {what}", programs.grid(rank, position))


# ---- all ranks together: run symbolically, without time


class Step(NamedTuple):
    """Numbers of events: first `needs` are awaited, then each of `meets` blocks until all its ranks are there, then the
    rank gives its part in `issues` and goes on. NONE where there is none.
    """

    needs: tuple[int, ...] = ()
    meets: tuple[int, ...] = ()
    issues: int = NONE


class Issue(NamedTuple):
    """The instruction at `position` of `rank` puts `event` into `queue`."""

    queue: Hashable
    event: int
    rank: int
    position: int


@dataclass(frozen=True)
class Halt:
    """A rank that never finishes: its position, and the event it waits for."""

    rank: int
    position: int
    event: int


class _Steps:
    """Numbers the events and holds every rank's steps in all models.

    Per communicator, sends, receives and reductions are issued, and a rank waits where it needs the value. With
    blocking receives it waits at the receive. With one queue every transfer and reduction is met: strictly one
    instruction after the other.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.issues: list[Issue] = []
        self.channels: dict[int, list[Step]] = {}
        self.blocking: dict[int, list[Step]] = {}
        self.one_queue: dict[int, list[Step]] = {}
        self.collectives = 0
        self._numbers: dict[Hashable, int] = {}

    def add(self, rank: int, instructions: Sequence[Expected]) -> None:
        """One step in each model for every instruction, in program order."""
        channels, blocking, one_queue = [], [], []
        for position, instruction in enumerate(instructions):
            meets = () if instruction.meets is None else (self._number(instruction.meets),)
            issues = NONE
            if instruction.issues is not None:
                issues = self._number(instruction.issues)
                self.issues.append(Issue(instruction.issues.queue, issues, rank, position))
            channels.append(Step(tuple(map(self._number, instruction.needs)), meets, issues))
            one_queue.append(Step(meets=meets if issues == NONE else (*meets, issues)))
            blocking.append(one_queue[-1] if instruction.receives else channels[-1])
        self.channels[rank], self.blocking[rank], self.one_queue[rank] = channels, blocking, one_queue

    def _number(self, event: Event) -> int:
        number = self._numbers.setdefault(event.name, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(event.size)
            self.collectives += event.collective
        return number


def _run(steps: Mapping[int, Sequence[Step]], sizes: Sequence[int]) -> list[Halt]:
    """Run all ranks as far as they come and return those that wait for ever. `sizes[e]` ranks take part in event e.

    Whatever the order of the ranks it ends in the same state: an event that can happen is not undone by another one,
    for a rank stands in one place at a time. So one run decides.
    """
    arrived = [0] * len(sizes)
    waiting: dict[int, list[int]] = {}
    position = dict.fromkeys(steps, 0)
    halted: dict[int, int] = {}

    def arrive(event: int) -> bool:
        arrived[event] += 1
        if arrived[event] < sizes[event]:
            return False
        ready.extend(waiting.pop(event, ()))
        return True

    ready = sorted(steps, reverse=True)
    while ready:
        rank = ready.pop()
        mine, at = steps[rank], position[rank]
        while at < len(mine):
            needs, meets, issues = mine[at]
            stop = next((event for event in needs if arrived[event] < sizes[event]), NONE)
            if stop == NONE:
                # An event that has happened is behind this rank: it has come back from waiting in it.
                stop = next((event for event in meets if arrived[event] < sizes[event] and not arrive(event)), NONE)
            if stop != NONE:
                waiting.setdefault(stop, []).append(rank)
                halted[rank] = stop
                break
            if issues != NONE:
                arrive(issues)
            at += 1
        position[rank] = at
    return [Halt(rank, at, halted[rank]) for rank, at in position.items() if at < len(steps[rank])]


def _first_clash(issues: Sequence[Issue]) -> tuple[Issue, Issue] | None:
    """None when all ends of every queue issue the same events in the same order, else the first two that differ.

    `issues` are in program order for each rank.
    """
    ends: dict[Hashable, dict[int, list[Issue]]] = {}
    for issue in issues:
        ends.setdefault(issue.queue, {}).setdefault(issue.rank, []).append(issue)
    for by_rank in ends.values():
        first, *others = by_rank.values()
        for other in others:
            for mine, theirs in zip(first, other):
                if mine.event != theirs.event:
                    return mine, theirs
    return None
