"""Where the weights' instructions stand in the programs: sums of tied embeddings, reductions, optimizer steps.

After the last backward (or weight gradient) of a stage:

    TE  of a tied model, once its first and its last stage are both done: an event of these two ranks
    RG  of the stage, after its TE. "early": at once, an event of the stage's tensor ranks (sequence parallelism sums
        over them first). "joint": one event of all ranks that hold these weights
    ST  of the model, after its last RG: one event of all its ranks

An event of several nodes goes to the first time when they can stop for it at no cost (timetable.py). A rank that
holds several stages of a model reduces them from the highest to the lowest, the order in which a pipeline finishes
them, but a tied last stage, which waits for the first one's end, comes last: the same order on all members.

Knows nothing of computing and transfers, which lowering.py appends to the same lists.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable

from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks, ModelShare
from rlhfuse.schedule.program.program import Instruction
from rlhfuse.schedule.program.timetable import Timetable

Stage = tuple[int, str, int]  # replica, pipeline, real stage
Cell = tuple[int, str, int]  # replica, pipeline, position: the ranks of stages position, position + pp, ...


class Reductions:
    """Appends TE, RG and ST to `lists` (rank -> instructions); is told the time by `tick` and progress by `finish`."""

    def __init__(
        self,
        ranks: FusedRanks,
        timetable: Timetable,
        tied: frozenset[str],
        joint: bool,
        lists: dict[int, list[Instruction]],
    ) -> None:
        self._ranks, self._timetable, self._joint, self._lists = ranks, timetable, joint, lists
        self._ends = {
            model: (0, layout.stages - 1) if model in tied and layout.pp > 1 else ()
            for model, layout in ranks.shape.layouts.items()
        }
        self._queues = {share.model: self._queues_of(share) for share in ranks.shape.shares}
        self._left = {model: sum(map(len, queues.values())) for model, queues in self._queues.items()}
        self._done: set[Stage] = set()  # the last backward has run
        self._whole: set[Stage] = set()  # done, and summed where tied
        self._later: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()

    def _queues_of(self, share: ModelShare) -> dict[Cell, deque[int]]:
        """The stages of every cell in the order of their RGs."""
        layout, last = share.layout, self._ends[share.model][-1:]
        order = sorted(range(layout.stages), key=lambda stage: (stage in last, -stage))
        return {
            (replica, name, place): deque(stage for stage in order if stage % layout.pp == place)
            for replica in range(self._ranks.shape.replicas)
            for name in share.names
            for place in range(layout.pp)
        }

    def tick(self, time: float) -> None:
        """Append all that stands before an action that ends at `time`."""
        while self._later and self._later[0][0] < time:
            now, _, append = heapq.heappop(self._later)
            append(now)

    def finish(self, time: float, model: str, stages: Iterable[Stage]) -> None:
        """The last backward of `stages`, all of one pipeline, has just been appended; it ended at `time`."""
        ends = self._ends[model]
        for replica, name, stage in stages:
            self._done.add((replica, name, stage))
            if stage not in ends:
                self._reduce(time, model, [(replica, name, stage)])
            elif all((replica, name, end) in self._done for end in ends):
                self._meet(time, [(replica, name, end) for end in ends], self._sum, model)

    def _meet(
        self, time: float, stages: list[Stage], append: Callable[[float, str, list[Stage]], None], model: str
    ) -> None:
        """Put an event of `stages` off to the first time from `time` on when their nodes can stop for it."""
        nodes = {self._ranks.node_of(ranks[0]) for ranks in map(self._ranks_of, stages)}
        moment = self._timetable.free(time, nodes)
        heapq.heappush(self._later, (moment, next(self._number), lambda now: append(now, model, stages)))

    def _sum(self, time: float, model: str, ends: list[Stage]) -> None:
        for end in ends:
            self._append(end, Kind.TE)
        self._reduce(time, model, ends)

    def _reduce(self, time: float, model: str, stages: list[Stage]) -> None:
        """The gradients of `stages` are whole: reduce whatever is next in its queue."""
        self._whole.update(stages)
        queues, depth = self._queues[model], self._ranks.shape.share(model).layout.pp
        for replica, name, stage in stages:
            place = stage % depth
            cells = [cell for cell in queues if cell[2] == place] if self._joint else [(replica, name, place)]
            while all(queues[cell] and (*cell[:2], queues[cell][0]) in self._whole for cell in cells):
                heads = [(*cell[:2], queues[cell].popleft()) for cell in cells]
                if self._joint:
                    self._meet(time, heads, self._start, model)
                else:
                    self._start(time, model, heads)

    def _start(self, time: float, model: str, stages: list[Stage]) -> None:
        for stage in stages:
            self._append(stage, Kind.RG)
        self._left[model] -= len(stages)
        if not self._left[model]:
            self._meet(time, [(*cell[:2], cell[2]) for cell in self._queues[model]], self._step, model)

    def _step(self, time: float, model: str, stages: list[Stage]) -> None:
        for stage in stages:  # the lowest of every rank
            self._append(stage, Kind.ST)

    def _append(self, stage: Stage, kind: Kind) -> None:
        _, name, number = stage
        for rank in self._ranks_of(stage):
            self._lists[rank].append(Instruction(Action(name, number, kind)))

    def _ranks_of(self, stage: Stage) -> tuple[int, ...]:
        return self._ranks.stages(stage[0], stage[1])[stage[2]]
