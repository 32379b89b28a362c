"""What one rank must do in a step, derived from the rank map and the counts alone: every action once, and after what.

Each also names the events that it takes part in, so that verify.py can run the programs: a transfer is an event of two
ranks; computing with tensor parallelism one of the stage's tensor ranks; a reduction starts with one of the tensor
ranks and is then one of all ranks that hold the same weights. Shares no code with lowering.py, which it judges.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule


class Event(NamedTuple):
    """Something that happens once, when `size` ranks take part; `queue` names the communicator if it is issued."""

    name: Hashable
    size: int
    queue: Hashable = None
    collective: bool = False  # about weights


class Expected(NamedTuple):
    """An instruction that a rank must have: its peer, what must stand before it, and its events.

    `needs` are awaited, `meets` blocks until all ranks of the event stand there, `issues` is put into a queue, in a
    receive as its second end.
    """

    peer: int | None = None
    after: tuple[Action, ...] = ()
    needs: tuple[Event, ...] = ()
    meets: Event | None = None
    issues: Event | None = None
    receives: bool = False


def expected_instructions(
    rank: int, schedule: Schedule, ranks: FusedRanks, tied: frozenset[str]
) -> dict[Action, Expected]:
    """All instructions of one global rank. Actions name real stages."""
    expected: dict[Action, Expected] = {}
    replica = ranks.replica_of(rank)
    for model in ranks.shape.layouts:
        name = ranks.pipeline_of(model, rank)
        pipeline = schedule.problem.pipeline(name)
        stages = ranks.stages(replica, name)
        _, _, t = ranks.locate(model, rank)
        path = tuple(stage[t] for stage in stages)  # the rank of each stage that talks to this one
        last = Kind.W if pipeline.split else Kind.B
        for stage in ranks.stages_of(model, rank):
            cell = stages[stage]
            for microbatch in range(pipeline.microbatches):
                expected.update(_compute(Action(name, stage, Kind.F, microbatch), path, cell))
                expected.update(_compute(Action(name, stage, Kind.B, microbatch), path, cell))
                if pipeline.split:
                    action = Action(name, stage, Kind.W, microbatch)
                    expected[action] = Expected(after=(action._replace(kind=Kind.B),), meets=_tensor(cell, action))
        expected.update(_weights(model, rank, path, ranks, Action(name, 0, last, pipeline.microbatches - 1), tied))
    return expected


def _compute(action: Action, path: tuple[int, ...], cell: tuple[int, ...]) -> Iterator[tuple[Action, Expected]]:
    """F or B of one micro-batch on a stage, with its receive and send."""
    name, stage, kind, microbatch = action
    forward = kind is Kind.F
    before, behind = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
    rank = path[stage]
    after: tuple[Action, ...] = () if forward else (Action(name, stage, Kind.F, microbatch),)
    needs: tuple[Event, ...] = ()
    source = Action(name, before, kind, microbatch)
    if 0 <= before < len(path) and path[before] == rank:
        after += (source,)
    elif 0 <= before < len(path):
        receive = Action(name, stage, Kind.RF if forward else Kind.RB, microbatch)
        event = _transfer(path[before], rank, source)
        after, needs = after + (receive,), (event,)
        yield receive, Expected(path[before], issues=event, receives=True)
    yield action, Expected(after=after, needs=needs, meets=_tensor(cell, action))
    if 0 <= behind < len(path) and path[behind] != rank:
        send = Action(name, stage, Kind.SF if forward else Kind.SB, microbatch)
        yield send, Expected(path[behind], (action,), issues=_transfer(rank, path[behind], action))


def _weights(
    model: str, rank: int, path: tuple[int, ...], ranks: FusedRanks, last: Action, tied: frozenset[str]
) -> Iterator[tuple[Action, Expected]]:
    """Sum of tied embeddings, reductions and optimizer step; `last` is the last backward, of stage 0."""
    name, layout = last.pipeline, ranks.shape.share(model).layout
    _, position, t = ranks.locate(model, rank)
    cell = ranks.stages(ranks.replica_of(rank), name)[position]
    replicas = ranks.dp_groups(model)[position][t]
    started, reduced = [], []
    for stage in ranks.stages_of(model, rank):
        done = last._replace(stage=stage)
        if model in tied and layout.pp > 1 and stage in (0, layout.stages - 1):
            ends = (path[0], path[-1])
            summed = Action(name, stage, Kind.TE)
            yield summed, Expected(after=(done,), meets=Event((Kind.TE, model, ends), 2, collective=True))
            done = summed
        action = Action(name, stage, Kind.RG)
        event = Event((Kind.RG, model, stage, t), len(replicas), (Kind.RG, model, replicas), collective=True)
        yield action, Expected(after=(done,), meets=_tensor(cell, action), issues=event)
        started.append(action)
        reduced.append(event)
    step = Event((Kind.ST, model), ranks.size, collective=True)
    yield Action(name, position, Kind.ST), Expected(after=tuple(started), needs=tuple(reduced), meets=step)


def _transfer(sender: int, receiver: int, action: Action) -> Event:
    return Event((sender, receiver, action), 2, (sender, receiver))


def _tensor(cell: tuple[int, ...], action: Action) -> Event | None:
    """What the tensor ranks of a stage do together."""
    return Event((cell, action), len(cell)) if len(cell) > 1 else None
