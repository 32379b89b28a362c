"""Collectives by hand: how many links a group has, and what starting up adds."""

import pytest

from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.forms.collectives import RankGroup

# 8 devices a machine: 100 GB/s within, 20 GB/s and a NIC for each beyond; steps of 1 us and 10 us
MACHINE = HardwareSpec(
    "x", 1e12, 1e12, 1e12, 100e9, 20e9, 1e9, 0.0, collective_seconds=1e-6, cross_collective_seconds=10e-6
)


@pytest.mark.parametrize(
    "ranks, stride, on_machine, machines, bandwidth",
    [
        (8, 1, 8, 1, 100e9),
        (16, 1, 8, 2, 100e9),  # eight NICs are faster than the links between devices
        (4, 2, 4, 1, 100e9),
        (8, 2, 4, 2, 80e9),
        (16, 4, 2, 8, 40e9),
        (4, 8, 1, 4, 20e9),
        (4, 64, 1, 4, 20e9),
        (1, 64, 1, 1, 100e9),
    ],
)
def test_rings_leave_a_machine_by_the_nics_of_their_members(ranks, stride, on_machine, machines, bandwidth):
    group = RankGroup(MACHINE, ranks, stride)
    assert (group.on_machine, group.machines, group.bandwidth) == (on_machine, machines, bandwidth)
    moved = (ranks - 1) / ranks * 1e9 / bandwidth
    steps = (ranks - machines) * 1e-6 + (machines - 1) * 10e-6
    assert group.gather_seconds(1e9) == pytest.approx(moved + steps)


def test_an_all_reduce_goes_up_and_down_a_tree():
    moved = 2 * 7 / 8 * 1e6
    assert RankGroup(MACHINE, 8).all_reduce_seconds(1e6) == pytest.approx(moved / 100e9 + 6e-6)
    assert RankGroup(MACHINE, 8, 4).all_reduce_seconds(1e6) == pytest.approx(moved / 40e9 + 2e-6 + 40e-6)
    assert RankGroup(MACHINE, 1).all_reduce_seconds(1e6) == RankGroup(MACHINE, 1).gather_seconds(1e6) == 0
