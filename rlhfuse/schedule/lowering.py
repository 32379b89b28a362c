"""From a schedule of nodes to one program per rank: merged stages expanded, communication added.

All programs are projections of ONE total order of events. Actions come by their end in the evaluated schedule,
dependencies first. A computing action is one event of the tensor ranks of its stage, followed at once by its
transfers, each an event of two ranks: a send on one, the matching receive on the other (as in torch's
`_add_send_recv`, the sender puts the receive in place). Neighbouring stages on one rank need no transfer. After the
last backward (or weight gradient) of a stage come the events of its weights, still inside the bubble:

    TE  of a tied model, once its first and its last stage are both done: an event of these two ranks
    RG  of the stage, after its TE. "early": an event of its tensor ranks (sequence parallelism sums over them before).
        "joint": one event of all its data-parallel ranks
    ST  of the model, after its last RG: one event of all its ranks

Why it cannot deadlock. *One queue*: every rank does strictly one instruction after the other, and a transfer or
collective happens when all its ranks stand at it. Take, at any moment, the first event of the total order that has
not happened. All events before it have happened, so it is the next instruction of every one of its ranks, and it
can happen. Inputs are there, for the order respects dependencies. This is the proof for `reduce="joint"`.

*Per communicator*: computing, TE and ST block, while sends, receives and reductions are only issued, each into the
queue of its communicator, which runs in issue order; a rank waits where it needs a value. Take the first blocking
event that has not happened. No rank of it is held up by an earlier event of the order, so all arrive. The transfers
it needs come earlier in the order, hence were issued on both sides, as was all before them in their channel's queue;
both ends of a channel issue in the same order, so the heads always match. An ST needs its RGs: all of them stand
before it on every rank, and their queue (one for each group of data-parallel ranks) holds nothing else. Its order is
the same on all members: a rank that holds several stages of a model reduces them from the highest to the lowest, the
order in which they finish in a pipeline, but a tied last stage, which waits for the first one's end, comes last.
So "early" programs cannot deadlock here, and neither can "joint" ones, which are early ones with some RGs put off.
Under one queue an early RG may hang: a rank would stand in it while its peers still need that rank's transfers.

Knows nothing of tensors, shapes or process groups: fusion/intra_stage.py runs the programs.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Iterator, Mapping

from rlhfuse.errors import InputError, ScheduleError
from rlhfuse.schedule.action import RECEIVE_OF, SEND_OF, Action, Kind
from rlhfuse.schedule.evaluate import end_times
from rlhfuse.schedule.graph import build_graph, kinds_of
from rlhfuse.schedule.program import Instruction, Program, Programs, fingerprint_of
from rlhfuse.schedule.ranks import FusedRanks, ModelShare
from rlhfuse.schedule.schedule import Schedule

REDUCE = ("early", "joint")
_Lists = dict[int, list[Instruction]]


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
    layouts = ranks.shape.layouts
    for model in [*sorted(tied), *(buffers or {})]:
        ranks.shape.share(model)
    check_placement(schedule, ranks)
    lists: _Lists = {rank: [] for rank in range(ranks.size)}
    pipelines = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}
    weights = {share.model: _Weights(share, ranks, share.model in tied, reduce, lists) for share in ranks.shape.shares}
    for action in total_order(schedule):
        pipeline = pipelines[action.pipeline]
        last = action.kind is kinds_of(pipeline)[-1] and action.microbatch == pipeline.microbatches - 1
        for replica in range(len(ranks.replicas)):
            stages = _expand(action, ranks, replica, lists)
            if last:
                weights[pipeline.model].finish(replica, pipeline.name, stages)
    return Programs(
        fingerprint=fingerprint_of(schedule, ranks),
        layouts={model: str(layout) for model, layout in layouts.items()},
        buffers={model: (buffers or {}).get(model) for model in layouts},
        by_rank={rank: Program(rank, tuple(instructions)) for rank, instructions in lists.items()},
    )


def total_order(schedule: Schedule) -> Iterator[Action]:
    """All actions by (end, node), each after what it depends on and after what is before it on its node.

    Ends alone would do if sums of floats were exact. Raises ScheduleError naming the cycle of a deadlock.
    """
    graph = build_graph(schedule.problem)
    orders = [[graph.number[action] for action in order] for order in schedule.orders]
    ends = end_times(graph, orders)
    following: list[list[int]] = [[o for o in pair if o >= 0] for pair in graph.downstream.tolist()]
    waits = (graph.upstream >= 0).astype(int).tolist()
    for order in orders:
        for before, after in zip(order, order[1:]):
            following[before].append(after)
            waits[after] += 1
    node = graph.node.tolist()
    heap = [(ends[o], node[o], o) for o in range(graph.size) if not waits[o]]
    heapq.heapify(heap)
    while heap:
        operation = heapq.heappop(heap)[2]
        yield graph.actions[operation]
        for target in following[operation]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(heap, (ends[target], node[target], target))


def _expand(action: Action, ranks: FusedRanks, replica: int, lists: _Lists) -> list[int]:
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


class _Weights:
    """What is left to do about the weights of one model: appends its TE, RG and ST as soon as they may stand."""

    def __init__(self, share: ModelShare, ranks: FusedRanks, tied: bool, reduce: str, lists: _Lists) -> None:
        layout = share.layout
        self._share, self._ranks, self._lists = share, ranks, lists
        self._joint = reduce == "joint"
        self._tied = (0, layout.stages - 1) if tied and layout.pp > 1 else ()
        self._done: set[tuple[int, str, int]] = set()  # (replica, pipeline, stage): the last backward, and TE if tied
        last = self._tied[-1:]
        self._queues = {
            (replica, name, place): deque(
                sorted(range(place, layout.stages, layout.pp), key=lambda stage: (stage in last, -stage))
            )
            for replica in range(len(ranks.replicas))
            for name in share.names
            for place in range(layout.pp)
        }

    def finish(self, replica: int, pipeline: str, stages: list[int]) -> None:
        """The last backward of `stages` has just been appended."""
        for stage in stages:
            self._done.add((replica, pipeline, stage))
            if stage in self._tied:
                if not all((replica, pipeline, end) in self._done for end in self._tied):
                    continue
                for end in self._tied:
                    self._append(replica, pipeline, end, Kind.TE)
            for ready in self._tied if stage in self._tied else (stage,):
                self._reduce(replica, pipeline, ready % self._share.layout.pp)
        if not any(self._queues.values()):
            for rank in range(self._ranks.size):
                stage = self._ranks.stages_of(self._share.model, rank)[0]
                name = self._ranks.pipeline_of(self._share.model, rank)
                self._lists[rank].append(Instruction(Action(name, stage, Kind.ST)))

    def _reduce(self, replica: int, pipeline: str, place: int) -> None:
        """Append the RGs that may now stand at `place` of a pipeline; jointly, of all pipelines."""
        mine = (replica, pipeline, place)
        cells = [key for key in self._queues if key[2] == place] if self._joint else [mine]
        while all(self._queues[cell] and self._ready(*cell[:2], self._queues[cell][0]) for cell in cells):
            for cell in cells:
                self._append(*cell[:2], self._queues[cell].popleft(), Kind.RG)

    def _ready(self, replica: int, pipeline: str, stage: int) -> bool:
        needed = self._tied if stage in self._tied else (stage,)
        return all((replica, pipeline, end) in self._done for end in needed)

    def _append(self, replica: int, pipeline: str, stage: int, kind: Kind) -> None:
        for rank in self._ranks.stages(replica, pipeline)[stage]:
            self._lists[rank].append(Instruction(Action(pipeline, stage, kind)))


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
