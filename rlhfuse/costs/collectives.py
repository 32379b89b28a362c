"""What collectives take over the links of a machine or between machines."""

from __future__ import annotations

from rlhfuse.config.spec import HardwareSpec


def link_bandwidth(machine: HardwareSpec, span: int) -> float:
    """Bytes/s per rank of a group that spans `span` consecutive ranks, the first of them on a node's first device."""
    return machine.node_link_bandwidth if span <= machine.devices_per_node else machine.cross_link_bandwidth


def ring_all_reduce_seconds(message_bytes: float, ranks: int, bandwidth: float) -> float:
    """Every rank sends 2 (n - 1) / n of the message: a reduce-scatter and an all-gather."""
    return 2 * ring_gather_seconds(message_bytes, ranks, bandwidth)


def ring_gather_seconds(whole_bytes: float, ranks: int, bandwidth: float) -> float:
    """All-gather or reduce-scatter of a message of `whole_bytes`: every rank sends (n - 1) / n of it."""
    return (ranks - 1) / ranks * whole_bytes / bandwidth
