"""Sends and receives of one rank over directed channels: one two-rank group for each (sender, receiver).

A channel delivers in the order of issue, which is the order that lowering fixed for both ends. A receive is
posted before it is needed (a send moves data only once its receive is posted); a send returns at once, and its
buffer belongs to the transfer until `drain` or until its work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Channels:
    """This rank's ends of all directed channels; `groups` maps (sender, receiver) to a process group."""

    def __init__(self, rank: int, groups: Mapping[tuple[int, int], dist.ProcessGroup], device: torch.device) -> None:
        self._rank = rank
        self._groups = groups
        self.device = device
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def connect(self) -> None:
        """Send one number over every channel; a collective."""
        # In sorted order on all ranks: the first channel not done is next on both its ends. Left to the first
        # receives, which are posted ahead, both ends of a pair would wait for each other (parallel/groups.py, connect).
        for pair in sorted(self._groups):
            number = torch.zeros(1, device=self.device)
            if self._rank == pair[0]:
                dist.send(number, pair[1], group=self._groups[pair])
            elif self._rank == pair[1]:
                dist.recv(number, pair[0], group=self._groups[pair])

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending; the tensor must not be written to any more."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, to, group=self._groups[self._rank, to])
        assert work is not None, "this rank is an end of the channel"
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self.finish(*self._sent.popleft())

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> tuple[dist.Work, Tensor]:
        """Post a receive; wait on the work before reading the tensor."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        work = dist.irecv(buffer, source, group=self._groups[source, self._rank])
        assert work is not None, "this rank is an end of the channel"
        return work, buffer

    def finish(self, work: dist.Work, tensor: Tensor) -> None:
        """Wait for a send or a posted receive, whose tensor may then be read on the current stream."""
        work.wait()
        if tensor.is_cuda:  # the current stream may be another than the one that the tensor was made on
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def drain(self, tell: Callable[[int], None]) -> None:
        """Wait until every send is done; before each wait `tell` gets the number of sends that are left."""
        while self._sent:
            tell(len(self._sent))
            self.finish(*self._sent.popleft())
