"""The moves of weights that an iteration makes between the layouts of its tasks (paper section 6), for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhfuse.config.role import Role
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.decisions.layouts import Task
from rlhfuse.decisions.move_seconds import MoveLoad
from rlhfuse.decisions.weight_moves import DESTINATIONS, Traffic
from rlhfuse.schedule.ir.ranks import FusedRanks


@dataclass(frozen=True)
class LayoutMove:
    """One move: the model, its task before and after, bytes, and seconds, any copy to host memory included."""

    model: str
    source: str
    target: str
    traffic: Traffic
    seconds: float


def layout_moves(
    tasks: tuple[Task, ...],
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
        load = MoveLoad.of(specs[model], layout, cells, target.layout, element_bytes, node, model.scalar_head)
        seconds = load.seconds(hardware)
        if target.name != "generation":
            seconds += load.host_copy_seconds(hardware)
        source = f"{model}_train {replace(layout, cut=None)}"
        moves.append(LayoutMove(model, source, f"{target.name} {target.layout}", load.traffic, seconds))
    return tuple(moves)
