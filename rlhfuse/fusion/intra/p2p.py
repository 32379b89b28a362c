"""Sends and receives of one rank over directed channels: one two-rank group for each (sender, receiver).

A channel delivers in the order of issue, which is the order that lowering fixed for both ends. A receive is posted
before it is needed (a send moves data only once its receive is posted); a send returns at once, and its buffer belongs
to the transfer until `drain` or until its work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.fusion.intra.receive_ring import ReceiveRing

# How many receives of a channel may be posted before their places in the program. On CPU a posted receive costs
# nothing: enough to hide the posting, few enough to bound the buffers. On CUDA it occupies the device until it is
# satisfied, and whatever has to wait for the device waits with it; in its place all that its sender needs of this rank
# has been launched, so the wait ends.
RECEIVES_AHEAD = {"cpu": 3, "cuda": 0}


class Channels:
    """This rank's ends of all directed channels; `groups` maps (sender, receiver) to a process group.

    `ahead` receives of a channel may be posted before their places, by default as the device wants it; where none may,
    receives go into rings of buffers.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
        device: torch.device,
        ahead: int | None = None,
    ) -> None:
        self._rank = rank
        self._groups = groups
        self.device = device
        self.ahead = RECEIVES_AHEAD[device.type] if ahead is None else ahead
        self.rings: dict[int, ReceiveRing] = {}  # by sender
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def connect(self, largest: int = 1) -> None:
        """Send one number and `largest` bytes, those of the longest micro-batch, over every channel; a collective."""
        # In sorted order on all ranks: the first channel not done is next on both its ends. Left to the first
        # receives, both ends of a pair would wait for each other (parallel/groups.py, connect).
        for pair in sorted(self._groups):
            for size in (1, largest):
                payload = torch.zeros(size, dtype=torch.uint8, device=self.device)
                if self._rank == pair[0]:
                    dist.send(payload, pair[1], group=self._groups[pair])
                elif self._rank == pair[1]:
                    dist.recv(payload, pair[0], group=self._groups[pair])

    def add_rings(self, slots: Mapping[int, int]) -> None:
        """Have rings of at least so many buffers, by sender; only between programs."""
        for source, count in slots.items():
            if source not in self.rings or self.rings[source].slots < count:
                self.rings[source] = ReceiveRing(count, self.device)

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending; the tensor must not be written to any more."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, to, group=self._groups[self._rank, to])
        assert work is not None, "this rank is an end of the channel"
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> tuple[dist.Work, Tensor]:
        """Post a receive into new memory; wait on the work before reading the tensor."""
        return self._receive(torch.empty(shape, dtype=dtype, device=self.device), source)

    def post_in_ring(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, slot: int
    ) -> tuple[dist.Work, Tensor]:
        """The same into a buffer of the ring, which has room for it and must be free."""
        ring = self.rings[source]
        with ring.posting(slot):
            return self._receive(ring.tensor(slot, shape, dtype), source)

    def _receive(self, buffer: Tensor, source: int) -> tuple[dist.Work, Tensor]:
        work = dist.irecv(buffer, source, group=self._groups[source, self._rank])
        assert work is not None, "this rank is an end of the channel"
        return work, buffer

    def drain(self, tell: Callable[[int], None]) -> None:
        """Wait until every send is done; before each wait `tell` gets the number of sends that are left."""
        while self._sent:
            tell(len(self._sent))
            self._sent.popleft()[0].wait()
