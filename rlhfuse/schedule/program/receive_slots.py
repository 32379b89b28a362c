"""Which buffer of its channel every receive of a program uses, so that the buffers can live as long as the run.

What is received is used for the last time in the last backward of its micro-batch on its stage: a hidden state because
the forward keeps it, a gradient because that is its only use. Then its buffer may be received into again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.schedule.ir.action import RECEIVES, Action, Kind
from rlhfuse.schedule.program.program import Program


@dataclass(frozen=True)
class ReceiveSlots:
    """`of[receive]` is its buffer's number on its channel, `counts[sender]` how many buffers that channel has.

    `freed[action]` are the buffers, as (sender, number), that are free again once the action, a backward, has run.
    """

    of: Mapping[Action, int]
    counts: Mapping[int, int]
    freed: Mapping[Action, tuple[tuple[int, int], ...]]


def receive_slots(program: Program) -> ReceiveSlots:
    """The fewest buffers for a program whose receives are posted in their places; the one free for longest is next."""
    last: dict[tuple, Action] = {}
    for instruction in program.instructions:
        action = instruction.action
        if action.kind in (Kind.B, Kind.W):
            last[_work(action)] = action
    uses: dict[Action, list[tuple[int, int]]] = {}
    of: dict[Action, int] = {}
    counts: dict[int, int] = {}
    free: dict[int, deque[int]] = {}
    for instruction in program.instructions:
        action, sender = instruction.action, instruction.peer
        if action.kind in RECEIVES and sender is not None:
            unused = free.setdefault(sender, deque())
            if not unused:
                unused.append(counts.get(sender, 0))
                counts[sender] = unused[0] + 1
            of[action] = unused.popleft()
            uses.setdefault(last[_work(action)], []).append((sender, of[action]))
        for sender, slot in uses.get(action, ()):
            free[sender].append(slot)
    return ReceiveSlots(of, counts, {action: tuple(slots) for action, slots in uses.items()})


def _work(action: Action) -> tuple:
    return action.pipeline, action.stage, action.microbatch
