"""From a schedule of nodes to one program per rank: merged stages expanded, sends and receives added.

An instruction prints as `actor:0F3`, `actor:0SF3>1` (send to rank 1) or `actor:1RF3<0` (receive from
rank 0) and parses back. Stage numbers are the model's real pipeline stages; tensor rank t of a stage
talks to tensor rank t of the next one. Neighbouring stages on one rank need no transfer.

Why it cannot deadlock. The actor's and the critic's transfers share rank pairs, in both directions,
so the order of posting matters. All programs are projections of ONE total order: actions by their end
in the evaluated schedule, each followed at once by its send and, in the same breath, by the matching
receive on the peer (as in torch's `_add_send_recv`, the sender puts the receive in place). Ends grow
along every dependency and along every node's order, because times are positive; sub-stages of one
merged action follow in data order. So take, at any moment, the first event of that total order that
has not happened: everything before it on its ranks has happened, hence it is at the head of its
programs (of both programs, for a transfer) and can happen. This holds even when sends and receives
both block and every communicator, of a rank or of a pair, runs in issue order; an executor that sends
asynchronously and posts receives ahead only has more room. For the same reason the receives of a
directed pair are in the order of its sends.

Knows nothing of tensors, shapes or process groups: fusion/intra_stage.py runs the programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhfuse.errors import InputError, ScheduleError
from rlhfuse.schedule.action import COMPUTE, RECEIVE_OF, SEND_OF, Action, Kind
from rlhfuse.schedule.evaluate import evaluate
from rlhfuse.schedule.ranks import FusedRanks
from rlhfuse.schedule.schedule import Schedule

_TEXT = re.compile(r"([^<>]+)(?:([<>])(\d+))?")
_SENDS = (Kind.SF, Kind.SB)


@dataclass(frozen=True)
class Instruction:
    """One action of a rank. `peer` is the other global rank of a send or receive, None when computing."""

    action: Action
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return str(self.action)
        return f"{self.action}{'>' if self.action.kind in _SENDS else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> "Instruction":
        """Inverse of `str`. Raises InputError on any other text."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            raise InputError(f"instruction {text!r} is not of the form actor:0F3, actor:0SF3>1 or actor:1RF3<0")
        action = Action.parse(match[1])
        mark = None if action.kind in COMPUTE else ">" if action.kind in _SENDS else "<"
        if match[2] != mark:
            raise InputError(f"instruction {text!r}: kind {action.kind} takes {mark + 'RANK' if mark else 'no peer'}")
        return Instruction(action, int(match[3]) if mark else None)


@dataclass(frozen=True)
class Program:
    """What one global rank does in one fused training step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]

    def text(self) -> str:
        """One line; `parse` is the inverse."""
        return f"rank {self.rank}: {' '.join(map(str, self.instructions))}".rstrip()

    @staticmethod
    def parse(text: str) -> "Program":
        """Read what `text` wrote. Raises InputError on a malformed line."""
        match = re.fullmatch(r"rank (\d+):(.*)", text.strip())
        if not match:
            raise InputError(f"program {text!r} must begin with 'rank N:'")
        return Program(int(match[1]), tuple(Instruction.parse(word) for word in match[2].split()))


def lower(schedule: Schedule, ranks: FusedRanks) -> dict[int, Program]:
    """One program for every rank of every replica, keyed by global rank.

    Raises ScheduleError when the schedule's placement is not that of `ranks`, or when it deadlocks.
    """
    check_placement(schedule, ranks)
    programs: dict[int, list[Instruction]] = {}
    order = _by_end(schedule)
    for replica, pipelines in enumerate(ranks.replicas):
        for name in pipelines:
            for stage in ranks.stages(replica, name):
                programs.update({rank: [] for rank in stage if rank not in programs})
        for action in order:
            _expand(action, ranks, replica, programs)
    return {rank: Program(rank, tuple(programs[rank])) for rank in sorted(programs)}


def _by_end(schedule: Schedule) -> list[Action]:
    """All actions by (end, node): a total order that every dependency and every node's order respects."""
    ends = evaluate(schedule).ends
    stamped = [
        (end, node, position)
        for node, row in enumerate(ends)
        for position, end in enumerate(row)
    ]
    return [schedule.orders[node][position] for _, node, position in sorted(stamped)]


def _expand(action: Action, ranks: FusedRanks, replica: int, programs: dict[int, list[Instruction]]) -> None:
    """Append a node's action to its ranks: each sub-stage in data order, with its transfer."""
    merge = ranks.merge(action.pipeline)
    stages = ranks.stages(replica, action.pipeline)
    first = action.stage * merge
    substages = range(first, first + merge)
    for stage in substages if action.kind is Kind.F else reversed(substages):
        target = stage + 1 if action.kind is Kind.F else stage - 1
        for t, rank in enumerate(stages[stage]):
            programs[rank].append(Instruction(action._replace(stage=stage)))
            if action.kind is Kind.W or not 0 <= target < len(stages) or stages[target][t] == rank:
                continue
            peer = stages[target][t]
            send = action._replace(stage=stage, kind=SEND_OF[action.kind])
            receive = action._replace(stage=target, kind=RECEIVE_OF[action.kind])
            programs[rank].append(Instruction(send, peer))
            programs[peer].append(Instruction(receive, rank))


def check_placement(schedule: Schedule, ranks: FusedRanks) -> None:
    """Raise ScheduleError unless the schedule's pipelines sit on the nodes where `ranks` puts them."""
    wanted = {
        name: share.placement(k) for share in ranks.shape.shares for k, name in enumerate(share.names)
    }
    found = {pipeline.name: pipeline.placement for pipeline in schedule.problem.pipelines}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            actor, critic = (share.layout for share in ranks.shape.shares)
            raise ScheduleError(
                f"pipeline {name} is on nodes {found.get(name)} in the schedule but on {wanted.get(name)} with "
                f"actor {actor} and critic {critic}; search a schedule for these layouts"
            )
