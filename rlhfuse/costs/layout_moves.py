"""What the moves of weights between the layouts of a run's tasks take each iteration (paper section 6).

The price adds up the rows of the plan that runs (decisions/weight_moves.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numba import njit

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.decisions.shards import Cells
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.decisions.weight_moves import WeightMoves, plan_moves
from rlhfuse.schedule.ir.ranks import FusedRanks, plain_cells
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import BENEATH, DESTINATIONS, ModelTask

STAYS, WITHIN, ACROSS = range(3)
SENT, RECEIVED = range(2)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one plan. `minimum_across`: what no plan can avoid sending between nodes."""

    stays: int
    within: int
    across: int
    minimum_across: int
    fullest_sender: int  # most bytes that one rank sends
    fullest_receiver: int


@dataclass(frozen=True)
class MoveLoad:
    """Bytes of a plan: `bytes`[STAYS, WITHIN a node or ACROSS, SENT or RECEIVED, rank]."""

    bytes: np.ndarray
    minimum_across: int

    @staticmethod
    def of(moves: WeightMoves, devices_per_node: int) -> MoveLoad:
        """The sums of a plan's rows."""
        world = 1 + int(moves.rows[:, 1:3].max())
        return MoveLoad(add_rows(moves.rows, moves.parts[:, 3], devices_per_node, world), moves.minimum_across)

    def seconds(self, hardware: HardwareSpec) -> float:
        """Seconds until the busiest rank is done: its copies, its node's links and the network, one after the other."""
        copying = hardware.memory_bandwidth / 2  # read and written
        busy = np.zeros(self.bytes.shape[-1])
        rates = copying, hardware.node_link_bandwidth, hardware.cross_link_bandwidth
        for kind, rate in zip(self.bytes.max(axis=1), rates):
            busy += kind / rate
        return float(busy.max())

    def host_copy_seconds(self, hardware: HardwareSpec) -> float:
        """What the fullest rank received, on to host memory."""
        return int(self.bytes[:, RECEIVED].sum(axis=0).max()) / hardware.host_bandwidth

    @property
    def traffic(self) -> Traffic:
        stays, within, across = self.bytes[:, RECEIVED].sum(axis=1).tolist()
        sender, receiver = (self.bytes[WITHIN] + self.bytes[ACROSS]).max(axis=1).tolist()
        return Traffic(stays, within, across, self.minimum_across, sender, receiver)


@dataclass(frozen=True)
class LayoutMove:
    """One move: the model, its task before and after, bytes, and seconds, any copy to host memory included; whether it
    goes on beneath generation."""

    model: str
    source: str
    target: str
    traffic: Traffic
    seconds: float
    beneath: bool = False


def layout_moves(
    tasks: tuple[ModelTask, ...],
    ranks: FusedRanks,
    specs: Mapping[Role, ModelSpec],
    element_bytes: int,
    hardware: HardwareSpec,
) -> tuple[LayoutMove, ...]:
    """The moves of the models that train, on `ranks`, with `hardware.devices_per_node` ranks on a node."""
    rows, node = {task.name: task for task in tasks}, hardware.devices_per_node
    moves = []
    for model, layout in ((task.role, task.layout) for task in tasks if task.training):
        target, cells = rows[DESTINATIONS[model]], ranks.pipelines(model)
        load = model_load(specs[model], layout, cells, target.layout, element_bytes, node, model.scalar_head)
        seconds, scores = load.seconds(hardware), target.name in BENEATH
        if scores:
            seconds += load.host_copy_seconds(hardware)
        source = f"{model}_train {replace(layout, cut=None)}"
        moves.append(LayoutMove(model, source, f"{target.name} {target.layout}", load.traffic, seconds, scores))
    return tuple(moves)


def move_lines(moves: Sequence[LayoutMove]) -> tuple[str, ...]:
    """A table of moves for people."""
    columns = ("stays", "within", "across", "minimum_across", "fullest_sender", "fullest_receiver")
    titles = ("on its rank", "in a node", "across", "at least", "top sender", "top receiver")
    lines = ["move" + " " * 45 + "".join(f"{title:>13s}" for title in titles) + "     seconds"]
    for move in moves:
        values = "".join(f"{readable_bytes(getattr(move.traffic, name)):>13s}" for name in columns)
        beneath = " hidden" if move.beneath else ""
        lines.append(f"{f'{move.source} -> {move.target}':49s}{values}{move.seconds:12.3g}{beneath}")
    return tuple(lines)


@lru_cache(maxsize=256)  # tables of layouts have the layout of one model in common
def model_load(
    spec: ModelSpec,
    source: ParallelLayout,
    cells: Cells,
    target: ParallelLayout,
    element_bytes: int,
    devices_per_node: int,
    scalar_head: bool = False,
) -> MoveLoad:
    """Load of moving a model from `source`, whose ranks are `cells`, to `target` in plain order.

    Raises ValueError as `plan_moves` does.
    """
    has = WeightHolders.of_layout(spec, source, cells, element_bytes, scalar_head)
    wants = WeightHolders.of_layout(spec, target, plain_cells(target), element_bytes, scalar_head)
    return MoveLoad.of(plan_moves(has, wants, devices_per_node), devices_per_node)


@njit(cache=True)
def add_rows(rows: np.ndarray, size: np.ndarray, devices_per_node: int, world: int) -> np.ndarray:
    sums = np.zeros((3, 2, world), np.int64)
    for row in range(len(rows)):
        source, target, moved = rows[row, 1], rows[row, 2], size[rows[row, 0]]
        kind = STAYS
        if source != target:
            kind = WITHIN if source // devices_per_node == target // devices_per_node else ACROSS
        sums[kind, SENT, source] += moved
        sums[kind, RECEIVED, target] += moved
    return sums
