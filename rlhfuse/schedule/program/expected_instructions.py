"""What one rank must do in a step, derived from the rank map and the counts alone: every action once, and after what.

Each duty also names the events that it takes part in, so that rendezvous.py can run the programs: a transfer is an
event of two ranks; computing with tensor parallelism one of the stage's tensor ranks; a reduction starts with one of
the tensor ranks (sequence parallelism sums over them) and is then one of all ranks that hold the same weights.

Shares no code with lowering.py, which it judges. Knows nothing of orders.
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


class Duty(NamedTuple):
    """An instruction that a rank must have: its peer, what must stand before it, and its events.

    `needs` are awaited, `meets` blocks until all ranks of the event stand there, `issues` is put into a queue.
    """

    peer: int | None = None
    after: tuple[Action, ...] = ()
    needs: tuple[Event, ...] = ()
    meets: Event | None = None
    issues: Event | None = None


def duties_of(rank: int, schedule: Schedule, ranks: FusedRanks, tied: frozenset[str]) -> dict[Action, Duty]:
    """All duties of one global rank. Actions name real stages."""
    duties: dict[Action, Duty] = {}
    replica = ranks.replica_of(rank)
    for model in ranks.shape.layouts:
        name = ranks.pipeline_of(model, rank)
        pipeline = schedule.problem.pipeline(name)
        stages = ranks.stages(replica, name)
        _, _, t = ranks.locate(model, rank)
        way = tuple(stage[t] for stage in stages)  # the rank of each stage that talks to this one
        last = Kind.W if pipeline.split else Kind.B
        for stage in ranks.stages_of(model, rank):
            cell = stages[stage]
            for microbatch in range(pipeline.microbatches):
                duties.update(_forward(name, stage, microbatch, way, cell))
                duties.update(_backward(name, stage, microbatch, way, cell))
                if pipeline.split:
                    action = Action(name, stage, Kind.W, microbatch)
                    duties[action] = Duty(after=(action._replace(kind=Kind.B),), meets=_together(cell, action))
        duties.update(_weights(model, rank, name, way, ranks, Action(name, 0, last, pipeline.microbatches - 1), tied))
    return duties


def _forward(
    name: str, stage: int, microbatch: int, way: tuple[int, ...], cell: tuple[int, ...]
) -> Iterator[tuple[Action, Duty]]:
    """Forward of one micro-batch on a stage, with its receive and send."""
    action = Action(name, stage, Kind.F, microbatch)
    rank, after, needs = way[stage], (), ()
    source = Action(name, stage - 1, Kind.F, microbatch)
    if stage and way[stage - 1] == rank:
        after = (source,)
    elif stage:
        receive = Action(name, stage, Kind.RF, microbatch)
        event = _transfer(way[stage - 1], rank, source)
        after, needs = (receive,), (event,)
        yield receive, Duty(way[stage - 1], issues=event)
    yield action, Duty(after=after, needs=needs, meets=_together(cell, action))
    if stage + 1 < len(way) and way[stage + 1] != rank:
        event = _transfer(rank, way[stage + 1], action)
        yield Action(name, stage, Kind.SF, microbatch), Duty(way[stage + 1], (action,), issues=event)


def _backward(
    name: str, stage: int, microbatch: int, way: tuple[int, ...], cell: tuple[int, ...]
) -> Iterator[tuple[Action, Duty]]:
    """Backward of one micro-batch on a stage, with its receive and send."""
    action = Action(name, stage, Kind.B, microbatch)
    rank, after, needs = way[stage], (Action(name, stage, Kind.F, microbatch),), ()
    source = Action(name, stage + 1, Kind.B, microbatch)
    if stage + 1 < len(way) and way[stage + 1] == rank:
        after += (source,)
    elif stage + 1 < len(way):
        receive = Action(name, stage, Kind.RB, microbatch)
        event = _transfer(way[stage + 1], rank, source)
        after, needs = after + (receive,), (event,)
        yield receive, Duty(way[stage + 1], issues=event)
    yield action, Duty(after=after, needs=needs, meets=_together(cell, action))
    if stage and way[stage - 1] != rank:
        event = _transfer(rank, way[stage - 1], action)
        yield Action(name, stage, Kind.SB, microbatch), Duty(way[stage - 1], (action,), issues=event)


def _weights(
    model: str, rank: int, name: str, way: tuple[int, ...], ranks: FusedRanks, last: Action, tied: frozenset[str]
) -> Iterator[tuple[Action, Duty]]:
    """Sum of tied embeddings, reductions and optimizer step; `last` is the last backward, of stage 0."""
    layout = ranks.shape.share(model).layout
    _, place, t = ranks.locate(model, rank)
    cell = ranks.stages(ranks.replica_of(rank), name)[place]
    replicas = ranks.dp_groups(model)[place][t]
    started, reduced = [], []
    for stage in ranks.stages_of(model, rank):
        done = last._replace(stage=stage)
        if model in tied and layout.pp > 1 and stage in (0, layout.stages - 1):
            ends = (way[0], way[-1])
            summed = Action(name, stage, Kind.TE)
            yield summed, Duty(after=(done,), meets=Event((Kind.TE, model, ends), 2, collective=True))
            done = summed
        action = Action(name, stage, Kind.RG)
        event = Event((Kind.RG, model, stage, t), len(replicas), (Kind.RG, model, replicas), collective=True)
        yield action, Duty(after=(done,), meets=_together(cell, action), issues=event)
        started.append(action)
        reduced.append(event)
    step = Event((Kind.ST, model), ranks.size, collective=True)
    yield Action(name, place, Kind.ST), Duty(after=tuple(started), needs=tuple(reduced), meets=step)


def _transfer(sender: int, receiver: int, action: Action) -> Event:
    return Event((sender, receiver, action), 2, (sender, receiver))


def _together(cell: tuple[int, ...], action: Action) -> Event | None:
    """What the tensor ranks of a stage do together."""
    return Event((cell, action), len(cell)) if len(cell) > 1 else None
