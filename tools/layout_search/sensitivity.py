"""Would another table be best if a constant of the machine were wrong: some of the best tables, priced again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from rlhfuse.base.errors import InputError
from rlhfuse.planning.price import bound_seconds, price_generation, weight_moves, with_schedules
from rlhfuse.planning.search.search import Row
from rlhfuse.planning.search.setting import Setting

TABLES = 10  # the best, that are priced again
FACTORS = (0.8, 1.2)
CONSTANTS = (
    "flops",
    "memory_bandwidth",
    "node_link_bandwidth",
    "cross_link_bandwidth",
    "host_bandwidth",
    "launch_seconds",
    "decode_layer_seconds",
    "collective_seconds",
    "cross_collective_seconds",
)


@dataclass(frozen=True)
class Swing:
    """With `constant` of HardwareSpec times `factor` the first table takes `behind` more, as a share, than the fastest
    of those that were priced again, whose number is `winner`; 1 is the first itself."""

    constant: str
    factor: float
    behind: float
    winner: int


def sensitivity(setting: Setting, rows: Sequence[Row]) -> Iterator[Swing]:
    """`rows`: the fastest first. Constants that are 0 on this machine are passed over."""
    for constant in CONSTANTS:
        value = getattr(setting.inputs.hardware, constant)
        for factor in FACTORS if value else ():
            other = with_constant(setting, constant, factor * value)
            seconds = [seconds_of(other, row) for row in rows]
            best = min(seconds)
            if best < inf:
                yield Swing(constant, factor, seconds[0] / best - 1, seconds.index(best) + 1)


def with_constant(setting: Setting, constant: str, value: float) -> Setting:
    """The same on a machine that differs in that."""
    inputs = setting.inputs
    hardware = replace(inputs.hardware, **{constant: value})
    return replace(setting, inputs=replace(inputs, hardware=hardware))


def seconds_of(setting: Setting, row: Row) -> float:
    """Seconds as far above those at its bound as they are now; infinite where its stages, cut anew, no longer fit."""
    try:
        draft = setting.draft(row.table)
    except InputError:
        return inf
    moves = sum(move.seconds for move in weight_moves(draft))
    bounded = with_schedules(draft, price_generation(draft), moves, bound_seconds(draft)).seconds
    return row.seconds / row.bound * bounded
