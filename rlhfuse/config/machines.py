"""Ranks of one or several kinds of machines, in the order in which they are named: a100:8,h100:8.

A task runs at the rates of the slowest of its ranks, and has the memory of the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import HardwareSpec

# Of a HardwareSpec, beside its seconds, what is worse where it is more.
COSTS = (
    "half_rate_tokens",
    "step_waiting",
    "process_bytes",
    "communicator_bytes",
    "channel_bytes",
    "host_process_bytes",
)


@dataclass(frozen=True)
class Machines:
    """So many ranks on machines of each kind, one kind after the other; neighbours differ."""

    kinds: tuple[tuple[HardwareSpec, int], ...]

    @staticmethod
    def of(kinds: Sequence[tuple[HardwareSpec, int]], ranks: int | None = None) -> Machines:
        """Raises InputError for a list that is not of whole machines, and of GPUs, or has not so many `ranks`."""
        merged = groupby(kinds, key=lambda kind: kind[0])
        machines = Machines(tuple((spec, sum(count for _, count in same)) for spec, same in merged))
        machines._check(ranks)
        return machines

    @property
    def ranks(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def text(self) -> str:
        """Name of the kind where there is one, else a list with counts."""
        if len(self.kinds) == 1:
            return self.kinds[0][0].name
        return ",".join(f"{spec.name}:{count}" for spec, count in self.kinds)

    def whole(self) -> HardwareSpec:
        """What a task on all ranks can count on."""
        return worst(self.kinds)

    def _check(self, ranks: int | None) -> None:
        listed = ",".join(f"{spec.name}:{count}" for spec, count in self.kinds)
        if ranks is not None and self.ranks != ranks:
            counts = " + ".join(str(count) for _, count in self.kinds)
            raise InputError(f"{listed}: {counts} = {self.ranks} ranks != world_size({ranks}); give every rank a kind")
        if len(self.kinds) == 1:
            return
        for spec, count in self.kinds:
            if spec.name == "cpu":
                raise InputError(f"{listed}: a run is on CPUs or on GPUs, not on both; name one of them")
            if count % spec.devices_per_node:
                raise InputError(
                    f"{listed}: {count} of {spec.name} are no whole machines of {spec.devices_per_node}; a machine has "
                    "GPUs of one kind"
                )


def worst(kinds: Sequence[tuple[HardwareSpec, int]]) -> HardwareSpec:
    """The least of every rate and of memory, the most of every floor and of what a process takes; one kind is as it
    is."""
    specs = [spec for spec, _ in kinds]
    if len(set(specs)) == 1:
        return specs[0]
    values = {}
    for field in fields(HardwareSpec):
        every, is_cost = [getattr(spec, field.name) for spec in specs], field.name.endswith("_seconds")
        if field.name != "name":
            values[field.name] = max(every) if is_cost or field.name in COSTS else min(every)
    return replace(specs[0], **values, name=",".join(f"{spec.name}:{count}" for spec, count in kinds))
