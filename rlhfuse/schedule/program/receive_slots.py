"""Which buffer of its channel every receive of a program uses, so that the buffers can live as long as the run.

What is received is used for the last time in a backward of its micro-batch on its stage: a hidden state, which the
forward keeps, in B; a gradient in B, or in W where that is split off, since the last layer's weights are multiplied
with it. Then its buffer may be received into again.
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
    split = {i.action.pipeline for i in program.instructions if i.action.kind is Kind.W}
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
            last = Kind.W if action.kind is Kind.RB and action.pipeline in split else Kind.B
            uses.setdefault(action._replace(kind=last), []).append((sender, of[action]))
        for sender, slot in uses.get(action, ()):
            free[sender].append(slot)
    return ReceiveSlots(of, counts, {action: tuple(slots) for action, slots in uses.items()})
