"""The ranks of a generation instance or of an inference worker; the first one leads: it alone reads the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from rlhfuse.parallel.collectives import all_gather_objects

T = TypeVar("T")


class TensorParallelGroup:
    """This rank's instance or worker."""

    def __init__(self, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        """`ranks` in order of `group`, which must carry CPU tensors; a single rank needs none."""
        self._ranks = tuple(ranks)
        self._group = group
        self._position = self._ranks.index(rank)
        self.is_leader = self._position == 0
        self.size = len(self._ranks)

    def broadcast(self, *values: int) -> tuple[int, ...]:
        """The leader's values on all ranks; a collective."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(tensor, src=self._ranks[0], group=self._group)
        return tuple(tensor.tolist())

    def parts(self, ranks: int) -> tuple[int, int]:
        """How many parts of so many ranks there are, and which of them this rank is in."""
        return max(1, self.size // ranks), self._position // ranks

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in order; a collective."""
        return all_gather_objects(value, self._group) if self.size > 1 else [value]

    def start_broadcast(self, *values: int) -> tuple[dist.Work, torch.Tensor]:
        """The leader's values on their way to all ranks; the tensor holds them once the work is done."""
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.broadcast(tensor, src=self._ranks[0], group=self._group, async_op=True)
        assert work is not None, "this rank is in its own group"
        return work, tensor


@dataclass(frozen=True)
class StepDecision:
    """What a leader tells its tensor ranks at a step boundary."""

    stop: bool = False  # decoding, for the barrier
    place: int | None = None  # in the draw, of the group to begin
    end: int = 0  # first place that is not needed
    answers: int = 0  # numbers that the answers of tools are, which follow

    def encode(self) -> tuple[int, ...]:
        return int(self.stop), -1 if self.place is None else self.place, self.end, self.answers

    @staticmethod
    def decode(numbers: Sequence[int]) -> StepDecision:
        """Inverse of `encode`."""
        stop, place, end, answers = numbers
        return StepDecision(bool(stop), None if place < 0 else place, end, answers)


class DelayedBroadcast:
    """The leader's decisions at step boundaries, in force one call later; all ranks call `pass_on` equally often."""

    def __init__(self, group: TensorParallelGroup, initial: StepDecision) -> None:
        self._group = group
        self._latest = initial
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def pass_on(self, decision: StepDecision) -> StepDecision:
        """Give what is in force from the next call on; returns what is in force now. One rank needs no delay."""
        if self._group.size == 1:
            return decision
        started = self._group.start_broadcast(*decision.encode())
        self.close()
        self._pending = started
        return self._latest

    def close(self) -> None:
        """Wait for the broadcast under way."""
        if self._pending is not None:
            work, tensor = self._pending
            work.wait()
            self._latest, self._pending = StepDecision.decode(tensor.tolist()), None
