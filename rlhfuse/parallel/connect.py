"""Every group communicates once before it is needed, as it will: NCCL does at first use what may wait for everybody.

It builds a communicator at the first operation of a group and blocks until all its ranks are there, and it connects
each algorithm (ring, tree, NVLS) when an operation and size first takes it. In the middle of a program that is a
deadlock, or memory asked for when there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

# More bytes than this take no other algorithm, and on CPU none does.
MOST_BYTES = {"cuda": 64 << 20, "cpu": 4096}


@dataclass(frozen=True)
class GroupUse:
    """A collective that a group is for, and the most elements it has on one rank, of its input or of its output."""

    group: dist.ProcessGroup
    operation: Literal["all_reduce", "reduce_scatter", "all_gather"]
    elements: int = 1
    dtype: torch.dtype = torch.float32

    def run(self, device: torch.device) -> None:
        """Once small and once as large as it is used, in zeros."""
        ranks = dist.get_world_size(self.group)
        most = min(self.elements, MOST_BYTES[device.type] // self.dtype.itemsize)
        for part in sorted({1, -(-most // ranks)}):
            whole = torch.zeros(part * ranks, dtype=self.dtype, device=device)
            if self.operation == "all_reduce":
                dist.all_reduce(whole, group=self.group)
            elif self.operation == "reduce_scatter":
                dist.reduce_scatter_tensor(whole.new_empty(part), whole, group=self.group)
            else:
                dist.all_gather_into_tensor(whole, whole.new_zeros(part), group=self.group)


def connect(uses: Sequence[GroupUse], device: torch.device) -> None:
    """Run `uses`, this rank's, in the order given; the ranks of each must all be here in time."""
    for use in uses:
        use.run(device)


def tensor_parallel_uses(group: dist.ProcessGroup, hidden: int, tokens: int, dtype: torch.dtype) -> list[GroupUse]:
    """What tensor ranks do with hidden states of `tokens` tokens, whole or cut over the ranks, and with rows' sums."""
    if dist.get_world_size(group) == 1:  # nothing is sent, and nobody asks for a communicator
        return []
    states = (GroupUse(group, kind, hidden * tokens, dtype) for kind in ("all_reduce", "reduce_scatter", "all_gather"))
    return [*states, GroupUse(group, "all_reduce", tokens)]
