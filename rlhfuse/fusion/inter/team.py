"""Ranks that act as one: those of a generation instance, or of an inference worker. The first one leads.

The leader decides, for it alone reads the store; the others learn what it decided. There are two ways to tell:

    agree     at once: everybody waits for the leader's words
    Relay     one call late: what the leader says at a step boundary holds at the next one, and has long arrived
              by then, so that a decode step never waits for a message

Knows nothing of what is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Team:
    """This rank's instance or worker."""

    def __init__(self, ranks: Sequence[int], rank: int, group: dist.ProcessGroup) -> None:
        """`ranks` in order of `group`, which must carry CPU tensors; a team of one never uses it."""
        self._ranks = tuple(ranks)
        self._group = group
        self.leads = self._ranks[0] == rank
        self.size = len(self._ranks)

    def agree(self, *values: int) -> tuple[int, ...]:
        """The leader's values on all ranks; a collective."""
        if self.size == 1:
            return values
        box = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(box, src=self._ranks[0], group=self._group)
        return tuple(box.tolist())

    def start_broadcast(self, value: int) -> tuple[dist.Work, torch.Tensor]:
        """The leader's value on its way to all ranks; the tensor holds it once the work is done."""
        box = torch.tensor([value])
        return dist.broadcast(box, src=self._ranks[0], group=self._group, async_op=True), box


class Relay:
    """The leader's decisions, passed on at step boundaries. All ranks call `pass_on` equally often."""

    def __init__(self, team: Team, before: int) -> None:
        """`before` is what holds at the first boundary, where nothing has been passed on yet."""
        self._team = team
        self._latest = before
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def pass_on(self, value: int) -> int:
        """Give what holds from the next call on; returns what holds now. A team of one needs no delay."""
        if self._team.size == 1:
            return value
        started = self._team.start_broadcast(value)
        self._settle()
        self._under_way = started
        return self._latest

    def close(self) -> None:
        """Wait for the value that nobody will ask for."""
        self._settle()

    def _settle(self) -> None:
        if self._under_way is not None:
            work, box = self._under_way
            work.wait()
            self._latest, self._under_way = int(box), None
