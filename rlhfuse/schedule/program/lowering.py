"""From a schedule of nodes to one program per rank: merged stages taken apart, communication and weights added.

All programs are projections of ONE total order of events: actions by their end, dependencies first, each computing
action followed at once by its transfers (the sender puts the receive in place, as in torch's `_add_send_recv`). Hence
they cannot deadlock; docs/explanation/programs.md argues it for one queue per communicator and for one per rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.schedule.ir.action import RECEIVE_OF, SEND_OF, Action, Kind
from rlhfuse.schedule.ir.evaluate import TOLERANCE, end_times
from rlhfuse.schedule.ir.graph import build_graph, kinds_of
from rlhfuse.schedule.ir.ranks import FusedRanks, ModelShare
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.program import Instruction, Program, Programs

REDUCE = ("early", "joint")
Stage = tuple[int, str, int]  # replica, pipeline, real stage
Cell = tuple[int, str, int]  # replica, pipeline, position: the ranks of stages position, position + pp, ...


def lower(
    schedule: Schedule, ranks: FusedRanks, *, tied: frozenset[str] = frozenset(), reduce: str = "early"
) -> Programs:
    """One program for every rank of every replica.

    `tied` names the models whose embedding and output layer share weights. "early" reductions need one queue per
    communicator, as gloo has; "joint" ones run with one queue per rank too, which is what a GPU may come to. Raises
    ScheduleError when the schedule's placement is not that of `ranks`, or when it deadlocks, InputError on unknown
    models and reductions.
    """
    if reduce not in REDUCE:
        raise InputError(f"reduce={reduce!r} is unknown; use {' or '.join(REDUCE)}")
    for model in tied:
        ranks.shape.share(model)
    check_placement(schedule, ranks)
    lists: dict[int, list[Instruction]] = {rank: [] for rank in range(ranks.size)}
    total_order = TotalOrder(schedule)
    weights = _WeightInstructions(ranks, total_order, tied, reduce == "joint", lists)
    pipelines = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}
    for end, action in total_order.actions():
        weights.advance(end)
        pipeline = pipelines[action.pipeline]
        last = action.kind is kinds_of(pipeline)[-1] and action.microbatch == pipeline.microbatches - 1
        for replica in range(ranks.shape.replicas):
            stages = _expand(action, ranks, replica, lists)
            if last:
                weights.gradients_done(end, pipeline.model, [(replica, pipeline.name, stage) for stage in stages])
    weights.advance(math.inf)
    return Programs(
        layouts={model: str(layout) for model, layout in ranks.shape.layouts.items()},
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
    given = {pipeline.name: pipeline.placement for pipeline in schedule.problem.pipelines}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise ScheduleError(
                f"pipeline {name} is on nodes {given.get(name)} in the schedule but on {wanted.get(name)} with "
                f"{ranks.shape}; search a schedule for these layouts"
            )


class TotalOrder:
    """All actions of a schedule by their end, and when nodes can be stopped for a collective at no cost.

    A node can stop at a time t when it is idle, between two actions, or in an action whose *latest start* (without
    making the schedule longer) is t or later. Raises ScheduleError naming the cycle of a deadlock.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._graph = graph = build_graph(schedule.problem)
        self._orders = [[graph.number[action] for action in order] for order in schedule.orders]
        self._ends = end_times(graph, self._orders)
        self._following: list[list[int]] = [[o for o in pair if o >= 0] for pair in graph.downstream.tolist()]
        for order in self._orders:
            for before, after in zip(order, order[1:]):
                self._following[before].append(after)

    def actions(self) -> Iterator[tuple[float, Action]]:
        """(end, action) by (end, node), each after what it depends on and after what is before it on its node."""
        for operation in self._operations:
            yield self._ends[operation], self._graph.actions[operation]

    def free_time(self, time: float, nodes: Iterable[int]) -> float:
        """The first time from `time` on, the makespan at the latest, when `nodes` may all stop at no cost."""
        closed = [(late, end) for node in nodes for late, end in self._closed[node] if end > time]
        slip = TOLERANCE * max(self._ends)
        for late, end in sorted(closed):
            if late + slip < time < end - slip:
                time = end
        return time

    @cached_property
    def _operations(self) -> list[int]:
        """Ends alone would do, but equal ends (after rounding) must not turn a dependency round."""
        node, ends = self._graph.node.tolist(), self._ends
        waits = [0] * self._graph.size
        for targets in self._following:
            for target in targets:
                waits[target] += 1
        heap = [(ends[o], node[o], o) for o in range(self._graph.size) if not waits[o]]
        heapq.heapify(heap)
        order = []
        while heap:
            operation = heapq.heappop(heap)[2]
            order.append(operation)
            for target in self._following[operation]:
                waits[target] -= 1
                if not waits[target]:
                    heapq.heappush(heap, (ends[target], node[target], target))
        return order

    @cached_property
    def _closed(self) -> list[list[tuple[float, float]]]:
        """Per node the times (latest start, end) of its actions when stopping it would delay the schedule."""
        graph, node = self._graph, self._graph.node.tolist()
        duration, lag, downstream = graph.duration.tolist(), graph.lag.tolist(), graph.downstream.tolist()
        makespan, latest = max(self._ends), [0.0] * graph.size
        closed: list[list[tuple[float, float]]] = [[] for _ in self._orders]
        for operation in reversed(self._operations):
            late = makespan
            for target in self._following[operation]:
                late = min(late, latest[target] - (lag[target] if target in downstream[operation] else 0.0))
            latest[operation] = late - duration[operation]
            if latest[operation] < self._ends[operation]:
                closed[node[operation]].append((latest[operation], self._ends[operation]))
        return closed


class _WeightInstructions:
    """Appends TE, RG and ST to `lists` (rank -> instructions), in the same total order. After a stage's last backward:

    TE  of a tied model, once its first and its last stage are both done: an event of these two ranks
    RG  of the stage, after its TE: "early" at once, an event of the stage's tensor ranks (sequence parallelism sums
        over them first), "joint" one event of all ranks that hold these weights
    ST  of the model, after its last RG: one event of all its ranks

    An event of several nodes goes to the first time when they can stop for it at no cost: at the time it is ready
    another model's action may be under way, and whoever waits in the collective could not start its next one. A rank
    that holds several stages reduces them from the highest to the lowest, as a pipeline finishes them, but a tied last
    stage, which waits for the first one's end, comes last: the same order on all members.
    """

    def __init__(
        self,
        ranks: FusedRanks,
        total_order: TotalOrder,
        tied: frozenset[str],
        joint: bool,
        lists: dict[int, list[Instruction]],
    ) -> None:
        self._ranks, self._total_order, self._joint, self._lists = ranks, total_order, joint, lists
        self._tied_ends = {
            model: (0, layout.stages - 1) if model in tied and layout.pp > 1 else ()
            for model, layout in ranks.shape.layouts.items()
        }
        self._queues = {share.model: self._queues_of(share) for share in ranks.shape.shares}
        self._left = {model: sum(map(len, queues.values())) for model, queues in self._queues.items()}
        self._done: set[Stage] = set()  # the last backward has run
        self._whole: set[Stage] = set()  # done, and summed where tied
        self._deferred: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()

    def _queues_of(self, share: ModelShare) -> dict[Cell, deque[int]]:
        """The stages of every cell in the order of their RGs."""
        layout, last = share.layout, self._tied_ends[share.model][-1:]
        order = sorted(range(layout.stages), key=lambda stage: (stage in last, -stage))
        return {
            (replica, name, position): deque(stage for stage in order if stage % layout.pp == position)
            for replica in range(self._ranks.shape.replicas)
            for name in share.names
            for position in range(layout.pp)
        }

    def advance(self, time: float) -> None:
        """Append all that stands before an action that ends at `time`."""
        while self._deferred and self._deferred[0][0] < time:
            now, _, append = heapq.heappop(self._deferred)
            append(now)

    def gradients_done(self, time: float, model: str, stages: Iterable[Stage]) -> None:
        """The last backward of `stages`, all of one pipeline, has just been appended; it ended at `time`."""
        ends = self._tied_ends[model]
        for replica, name, stage in stages:
            self._done.add((replica, name, stage))
            if stage not in ends:
                self._reduce(time, model, [(replica, name, stage)])
            elif all((replica, name, end) in self._done for end in ends):
                self._defer(time, [(replica, name, end) for end in ends], self._sum_tied, model)

    def _defer(
        self, time: float, stages: list[Stage], append: Callable[[float, str, list[Stage]], None], model: str
    ) -> None:
        """Put an event of `stages` off to the first time from `time` on when their nodes can stop for it."""
        nodes = {self._ranks.node_of(ranks[0]) for ranks in map(self._ranks_of, stages)}
        moment = self._total_order.free_time(time, nodes)
        heapq.heappush(self._deferred, (moment, next(self._number), lambda now: append(now, model, stages)))

    def _sum_tied(self, time: float, model: str, ends: list[Stage]) -> None:
        for end in ends:
            self._append(end, Kind.TE)
        self._reduce(time, model, ends)

    def _reduce(self, time: float, model: str, stages: list[Stage]) -> None:
        """The gradients of `stages` are whole: reduce whatever is next in its queue."""
        self._whole.update(stages)
        queues, depth = self._queues[model], self._ranks.shape.share(model).layout.pp
        for replica, name, stage in stages:
            position = stage % depth
            cells = [cell for cell in queues if cell[2] == position] if self._joint else [(replica, name, position)]
            while all(queues[cell] and (*cell[:2], queues[cell][0]) in self._whole for cell in cells):
                heads = [(*cell[:2], queues[cell].popleft()) for cell in cells]
                if self._joint:
                    self._defer(time, heads, self._start_reduction, model)
                else:
                    self._start_reduction(time, model, heads)

    def _start_reduction(self, time: float, model: str, stages: list[Stage]) -> None:
        for stage in stages:
            self._append(stage, Kind.RG)
        self._left[model] -= len(stages)
        if not self._left[model]:
            self._defer(time, list(self._queues[model]), self._step, model)

    def _step(self, time: float, model: str, stages: list[Stage]) -> None:
        for stage in stages:  # the lowest of every rank
            self._append(stage, Kind.ST)

    def _append(self, stage: Stage, kind: Kind) -> None:
        _, name, number = stage
        for rank in self._ranks_of(stage):
            self._lists[rank].append(Instruction(Action(name, number, kind)))

    def _ranks_of(self, stage: Stage) -> tuple[int, ...]:
        return self._ranks.stages(stage[0], stage[1])[stage[2]]
