"""Two machines that run programs symbolically, without time: what can happen happens, or somebody waits for ever.

A rank is a list of steps over numbered events. An event happens when as many ranks take part as it has; a step first
awaits the events that it `needs`, then stands in each event that it `meets` until that happens, then gives its part in
the event that it `issues` and goes on. The two machines differ in the steps only:

    per communicator   sends, receives and reductions are issued; a rank waits where it needs the value. Each queue
                       runs in issue order, so all its ends must issue in one order, which `queues_agree` tells
    one queue          every transfer and reduction is met: strictly one instruction after the other

Whatever order the machine tries ranks in, it ends in the same state: an event that can happen is not undone by
another one, for a rank stands in one place at a time. So one run decides.

Knows nothing of what events mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NONE = -1


class Step(NamedTuple):
    """Numbers of events; NONE where there is none."""

    needs: tuple[int, ...] = ()
    meets: tuple[int, ...] = ()
    issues: int = NONE


@dataclass(frozen=True)
class Halt:
    """A rank that never finishes: its position, and the event it waits for."""

    rank: int
    position: int
    event: int


def run(steps: Mapping[int, Sequence[Step]], sizes: Sequence[int]) -> list[Halt]:
    """Run all ranks as far as they come and return those that wait for ever. `sizes[e]` ranks take part in event e."""
    arrived = [0] * len(sizes)
    waiting: dict[int, list[int]] = {}
    position = dict.fromkeys(steps, 0)
    halted: dict[int, int] = {}

    def arrive(event: int) -> bool:
        arrived[event] += 1
        if arrived[event] < sizes[event]:
            return False
        ready.extend(waiting.pop(event, ()))
        return True

    ready = sorted(steps, reverse=True)
    while ready:
        rank = ready.pop()
        mine, at = steps[rank], position[rank]
        while at < len(mine):
            needs, meets, issues = mine[at]
            stop = next((event for event in needs if arrived[event] < sizes[event]), NONE)
            if stop == NONE:
                # An event that has happened is behind this rank: it has come back from waiting in it.
                stop = next((event for event in meets if arrived[event] < sizes[event] and not arrive(event)), NONE)
            if stop != NONE:
                waiting.setdefault(stop, []).append(rank)
                halted[rank] = stop
                break
            if issues != NONE:
                arrive(issues)
            at += 1
        position[rank] = at
    return [Halt(rank, at, halted[rank]) for rank, at in position.items() if at < len(steps[rank])]


class Issue(NamedTuple):
    """The instruction at `position` of `rank` puts `event` into `queue`."""

    queue: Hashable
    event: int
    rank: int
    position: int


def queues_agree(issues: Sequence[Issue]) -> tuple[Issue, Issue] | None:
    """None when all ends of every queue issue the same events in the same order, else the first two that differ.

    `issues` are in program order for each rank.
    """
    ends: dict[Hashable, dict[int, list[Issue]]] = {}
    for issue in issues:
        ends.setdefault(issue.queue, {}).setdefault(issue.rank, []).append(issue)
    for by_rank in ends.values():
        first, *others = by_rank.values()
        for other in others:
            for one, two in zip(first, other):
                if one.event != two.event:
                    return one, two
    return None
