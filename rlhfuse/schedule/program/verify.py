"""Refuses programs that could hang, starve or compute the wrong thing, before the first byte is sent.

First each rank by itself: its program holds exactly its duties (duties.py), each once, with the right peer and after
what it depends on; it computes in the order of its node; and the activations alive never pass the memory cap. Then
all ranks together, under rendezvous semantics (rendezvous.py) in two models. *Per communicator* is what NCCL
promises, and must hold: computing and blocking collectives in program order, sends, receives and reductions in the
issue order of their communicator. *One queue* is stricter: all transfers and collectives of a rank in program order.
Programs that pass here run under any looser semantics (buffered sends, receives posted ahead).

Both ends of a transfer are one event, of one micro-batch of one pipeline at one border between stages, so their
shapes are equal as soon as all ranks know the same token counts; `shapes` holds these against the buffers.

It shares no code with lowering.py but the instruction type. Knows nothing of times.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlhfuse.errors import InputError, ScheduleError
from rlhfuse.schedule.ir.action import COMPUTE, SENDS, Action, Kind
from rlhfuse.schedule.ir.evaluate import loosen, tidy
from rlhfuse.schedule.ir.graph import kinds_of
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.expected_instructions import Duty, Event, duties_of
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.program.rendezvous import NONE, Halt, Issue, Step, queues_agree, run

Shapes = Mapping[str, Sequence[Sequence[int]]]  # model -> [dp rank][micro-batch] -> tokens


@dataclass(frozen=True)
class Verified:
    """What programs do and which of the two models they satisfy. A collective counts once for its group.

    `hang` says, where `one_queue` is False, how the programs would hang if every rank had one queue.
    """

    transfers: int
    collectives: int
    channels: bool
    one_queue: bool
    hang: str = ""


def verify(
    programs: Programs,
    schedule: Schedule,
    ranks: FusedRanks,
    *,
    tied: frozenset[str] = frozenset(),
    shapes: Shapes | None = None,
) -> Verified:
    """Check `programs` against their schedule and run them symbolically in both models.

    `tied` names the models with tied embeddings; `shapes` gives the tokens of every micro-batch. Raises ScheduleError
    naming rank, position and instruction, with the grid, unless they are for this schedule and these ranks, every
    rank does its duties, and the model of one queue per communicator holds; InputError on shapes that do not fit.
    """
    programs.refuse_unless_for(schedule, ranks)
    if shapes is not None:
        check_shapes(programs, schedule, ranks, shapes)
    with _collector_paused():
        book = _check_ranks(programs, schedule, ranks, tied)
        clash = queues_agree(book.issues)
        if clash:
            one, two = clash
            there = programs[two.rank].instructions[two.position]
            where = f"meets {there} at position {two.position} of rank {two.rank}"
            raise _error(programs, one.rank, one.position, where)
        halts = run(book.channels, book.sizes)
        if halts:
            hang = _error(programs, halts[0].rank, halts[0].position, _never(programs, halts))
            raise ScheduleError(f"deadlock: {hang}", hang.grid)
        stricter = run(book.one_queue, book.sizes)
    transfers = sum(i.action.kind in SENDS for program in programs.values() for i in program.instructions)
    return Verified(transfers, book.collectives, True, not stricter, _never(programs, stricter))


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


def _check_ranks(programs: Programs, schedule: Schedule, ranks: FusedRanks, tied: frozenset[str]) -> _Book:
    """Check every rank by itself; returns the steps of all."""
    rows = _rows(schedule, ranks)
    book = _Book()
    for rank, program in sorted(programs.by_rank.items()):
        duties = duties_of(rank, schedule, ranks, tied)
        actions = [instruction.action for instruction in program.instructions]
        _check_duties(programs, rank, actions, duties)
        _check_row(programs, rank, actions, rows[rank])
        _check_memory(programs, rank, actions, schedule, ranks)
        book.add(rank, [duties[action] for action in actions])
    return book


class _Book:
    """Numbers the events and writes every rank's steps for both machines."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.issues: list[Issue] = []
        self.channels: dict[int, list[Step]] = {}
        self.one_queue: dict[int, list[Step]] = {}
        self.collectives = 0
        self._numbers: dict[Hashable, int] = {}

    def add(self, rank: int, duties: Sequence[Duty]) -> None:
        """One step in each machine for every duty, in program order."""
        loose, strict = [], []
        for position, duty in enumerate(duties):
            meets = () if duty.meets is None else (self._number(duty.meets),)
            issues = NONE if duty.issues is None else self._number(duty.issues)
            if issues != NONE:
                self.issues.append(Issue(duty.issues.queue, issues, rank, position))
            loose.append(Step(tuple(map(self._number, duty.needs)), meets, issues))
            strict.append(Step(meets=meets if issues == NONE else (*meets, issues)))
        self.channels[rank], self.one_queue[rank] = loose, strict

    def _number(self, event: Event) -> int:
        number = self._numbers.setdefault(event.name, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(event.size)
            self.collectives += event.collective
        return number


def check_shapes(programs: Programs, schedule: Schedule, ranks: FusedRanks, shapes: Shapes) -> None:
    """Raise InputError unless `shapes` has the tokens of every micro-batch, and each fits its model's buffer."""
    for model, layout in ranks.shape.layouts.items():
        table = shapes.get(model, ())
        if len(table) != layout.dp:
            raise InputError(f"shapes of {model} are for {len(table)} pipelines, {layout} has dp({layout.dp})")
        wanted = next(p.microbatches for p in schedule.problem.pipelines if p.model == model)
        for pipeline, tokens in enumerate(table):
            if len(tokens) != wanted:
                raise InputError(
                    f"shapes of {model}: pipeline {pipeline} has {len(tokens)} micro-batches, the schedule has {wanted}"
                )
            programs.refuse_tokens(model, tokens)


def _check_duties(programs: Programs, rank: int, actions: Sequence[Action], duties: Mapping[Action, Duty]) -> None:
    """The program holds every duty once, with its peer and after what it depends on, and nothing else."""
    at: dict[Action, int] = {}
    for position, action in enumerate(actions):
        if at.setdefault(action, position) != position:
            raise _error(programs, rank, position, f"is done twice, first at position {at[action]}")
    for position, (instruction, action) in enumerate(zip(programs[rank].instructions, actions)):
        duty = duties.get(action)
        if duty is None:
            raise _error(programs, rank, position, "has no place here: this rank holds no such stage or micro-batch")
        if instruction.peer != duty.peer:
            raise _error(programs, rank, position, f"has the wrong peer: the other end is on rank {duty.peer}")
        for needed in duty.after:
            if at.get(needed, position) >= position:
                raise _error(programs, rank, position, f"runs before {needed}")
    for action in duties:
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


def _check_row(programs: Programs, rank: int, actions: Sequence[Action], row: Sequence[Action]) -> None:
    computed = [(position, action) for position, action in enumerate(actions) if action.kind in COMPUTE]
    for (position, action), wanted in zip(computed, row):
        if action != wanted:
            raise _error(programs, rank, position, f"stands where the schedule has {wanted}")


def _check_memory(
    programs: Programs, rank: int, actions: Sequence[Action], schedule: Schedule, ranks: FusedRanks
) -> None:
    """Activations from a forward to its last backward stay under the cap of the rank's node."""
    cap = schedule.problem.node_cap(ranks.node_of(rank))
    if cap == math.inf:
        return
    pipelines = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}
    held: Counter[tuple[str, int]] = Counter()
    for position, action in enumerate(actions):
        if action.kind not in COMPUTE:
            continue
        pipeline, merged = pipelines[action.pipeline], action.stage // ranks.merge(action.pipeline)
        if action.kind is not Kind.F:
            held[action.pipeline, merged] -= action.kind is kinds_of(pipeline)[-1]
            continue
        held[action.pipeline, merged] += 1
        total = tidy(sum(count * pipelines[name].activation[stage] for (name, stage), count in held.items()))
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
