"""From a schedule of nodes to one program per rank: merged stages expanded, communication added.

All programs are projections of ONE total order of events. Actions come by their end in the evaluated schedule,
dependencies first. A computing action is one event of the tensor ranks of its stage, followed at once by its
transfers, each an event of two ranks: a send on one, the matching receive on the other (as in torch's
`_add_send_recv`, the sender puts the receive in place). Neighbouring stages on one rank need no transfer. The sums
of tied embeddings (TE), gradient reductions (RG) and optimizer steps (ST) have their place in the same order
(reductions.py says where).

Why it cannot deadlock. *One queue*: every rank does strictly one instruction after the other, and a transfer or
collective happens when all its ranks stand at it. Take, at any moment, the first event of the total order that has
not happened. All events before it have happened, so it is the next instruction of every one of its ranks, and it
can happen. Inputs are there, for the order respects dependencies. This is the proof for `reduce="joint"`.

*Per communicator*: computing, TE and ST block, while sends, receives and reductions are only issued, each into the
queue of its communicator, which runs in issue order; a rank waits where it needs a value. Take the first blocking
event that has not happened. No rank of it is held up by an earlier event of the order, so all arrive. The transfers
it needs come earlier in the order, hence were issued on both sides, as was all before them in their channel's queue;
both ends of a channel issue in the same order, so the heads always match. An ST needs its model's RGs: all of them
stand before it on every rank, and their queue (one for each group of data-parallel ranks) holds nothing else, in the
same order on all members. So neither "early" nor "joint" programs can deadlock. Under one queue an early RG may hang:
a rank would stand in it while the other members still need that rank's transfers.

Knows nothing of tensors, shapes or process groups: fusion/intra/executor.py runs the programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhfuse.errors import InputError, ScheduleError
from rlhfuse.schedule.ir.action import RECEIVE_OF, SEND_OF, Action, Kind
from rlhfuse.schedule.ir.graph import kinds_of
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.program import Instruction, Program, Programs, fingerprint_of
from rlhfuse.schedule.program.reductions import Reductions
from rlhfuse.schedule.program.timetable import Timetable

REDUCE = ("early", "joint")


def lower(
    schedule: Schedule,
    ranks: FusedRanks,
    *,
    tied: frozenset[str] = frozenset(),
    reduce: str = "early",
    buffers: Mapping[str, int | None] | None = None,
) -> Programs:
    """One program for every rank of every replica.

    `tied` names the models whose embedding and output layer share weights; `buffers` the most tokens of a
    micro-batch per model. "early" reductions satisfy the model of one queue per communicator, "joint" ones that of
    one queue per rank too. Raises ScheduleError when the schedule's placement is not that of `ranks`, or when it
    deadlocks, InputError on unknown models and reductions.
    """
    if reduce not in REDUCE:
        raise InputError(f"reduce={reduce!r} is unknown; use {' or '.join(REDUCE)}")
    layouts, buffers = ranks.shape.layouts, buffers or {}
    for model in (*tied, *buffers):
        ranks.shape.share(model)
    check_placement(schedule, ranks)
    lists: dict[int, list[Instruction]] = {rank: [] for rank in range(ranks.size)}
    timetable = Timetable(schedule)
    reductions = Reductions(ranks, timetable, tied, reduce == "joint", lists)
    pipelines = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}
    for end, action in timetable.actions():
        reductions.tick(end)
        pipeline = pipelines[action.pipeline]
        last = action.kind is kinds_of(pipeline)[-1] and action.microbatch == pipeline.microbatches - 1
        for replica in range(ranks.shape.replicas):
            stages = _expand(action, ranks, replica, lists)
            if last:
                reductions.finish(end, pipeline.model, [(replica, pipeline.name, stage) for stage in stages])
    reductions.tick(math.inf)
    return Programs(
        fingerprint=fingerprint_of(schedule, ranks),
        layouts={model: str(layout) for model, layout in layouts.items()},
        buffers={model: buffers.get(model) for model in layouts},
        by_rank={rank: Program(rank, tuple(instructions)) for rank, instructions in lists.items()},
    )


def _expand(action: Action, ranks: FusedRanks, replica: int, lists: dict[int, list[Instruction]]) -> list[int]:
    """Append a node's action to its ranks, each sub-stage in data order with its transfers; returns the sub-stages."""
    merge = ranks.merge(action.pipeline)
    stages = ranks.stages(replica, action.pipeline)
    substages = list(range(action.stage * merge, (action.stage + 1) * merge))
    if action.kind is not Kind.F:
        substages.reverse()
    for stage in substages:
        target = stage + 1 if action.kind is Kind.F else stage - 1
        compute = Instruction(action._replace(stage=stage))
        for rank in stages[stage]:
            lists[rank].append(compute)
        if action.kind is Kind.W or not 0 <= target < len(stages):
            continue
        send = action._replace(stage=stage, kind=SEND_OF[action.kind])
        receive = action._replace(stage=target, kind=RECEIVE_OF[action.kind])
        for rank, peer in zip(stages[stage], stages[target]):
            if rank != peer:
                lists[rank].append(Instruction(send, peer))
                lists[peer].append(Instruction(receive, rank))
    return substages


def check_placement(schedule: Schedule, ranks: FusedRanks) -> None:
    """Raise ScheduleError unless the schedule's pipelines sit on the nodes where `ranks` puts them."""
    wanted = {name: share.placement(k) for share in ranks.shape.shares for k, name in enumerate(share.names)}
    found = {pipeline.name: pipeline.placement for pipeline in schedule.problem.pipelines}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ScheduleError(
                f"pipeline {name} is on nodes {found.get(name)} in the schedule but on {wanted.get(name)} with "
                f"{ranks.shape}; search a schedule for these layouts"
            )
