"""What collectives take over the links of a machine or between machines.

Bytes go round rings. Every device has a NIC of its own, and where a group leaves its machines NCCL runs a ring through
each of its members' NICs, so a group with g ranks on a machine has g of them. Start-ups are counted as NCCL's own cost
model does (tuning.cc): a ring has a step for every rank, an all-reduce of few bytes goes up and down a tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba.extending import register_jitable

from rlhfuse.config.spec import HardwareSpec


@dataclass(frozen=True)
class RankGroup:
    """`ranks` ranks, each `stride` after the one before, the first of them on a machine's first device."""

    hardware: HardwareSpec
    ranks: int
    stride: int = 1

    @property
    def on_machine(self) -> int:
        """Members on one machine."""
        return max(1, min(self.ranks, self.hardware.devices_per_node // self.stride))

    @property
    def machines(self) -> int:
        return -(-self.ranks // self.on_machine)

    @property
    def bandwidth(self) -> float:
        """Bytes/s that each rank sends round all rings together."""
        within = self.hardware.node_link_bandwidth
        return within if self.machines == 1 else min(within, self.on_machine * self.hardware.cross_link_bandwidth)

    def gather_seconds(self, whole_bytes: float) -> float:
        """All-gather or reduce-scatter of a message of `whole_bytes`."""
        bandwidth, hardware = self.bandwidth * self.hardware.gather_share, self.hardware
        across = self.machines - 1
        steps = (self.ranks - 1 - across) * hardware.collective_seconds + across * hardware.cross_collective_seconds
        return ring_gather_seconds(whole_bytes, self.ranks, bandwidth) + steps

    def all_reduce_seconds(self, message_bytes: float) -> float:
        """Sum of a message over all ranks."""
        return self.sum_seconds(message_bytes) + 2 * (
            math.ceil(math.log2(self.on_machine)) * self.hardware.collective_seconds
            + math.ceil(math.log2(self.machines)) * self.hardware.cross_collective_seconds
        )

    def sum_seconds(self, message_bytes: float) -> float:
        """The same without its start-up."""
        return ring_all_reduce_seconds(message_bytes, self.ranks, self.bandwidth)


def send_seconds(hardware: HardwareSpec, message_bytes: float, across: bool) -> float:
    """One message to another rank, `across` machines or within one."""
    if across:
        return message_bytes / hardware.cross_link_bandwidth + hardware.cross_collective_seconds
    return message_bytes / hardware.node_link_bandwidth + hardware.collective_seconds


@register_jitable(error_model="numpy", _nrt=False)
def ring_all_reduce_seconds(message_bytes: float, ranks: int, bandwidth: float) -> float:
    """Every rank sends 2 (n - 1) / n of the message: a reduce-scatter and an all-gather."""
    return 2 * ring_gather_seconds(message_bytes, ranks, bandwidth)


@register_jitable(error_model="numpy", _nrt=False)
def ring_gather_seconds(whole_bytes: float, ranks: int, bandwidth: float) -> float:
    """All-gather or reduce-scatter of a message of `whole_bytes`: every rank sends (n - 1) / n of it."""
    return (ranks - 1) / ranks * whole_bytes / bandwidth
