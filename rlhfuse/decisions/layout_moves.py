"""The weight moves of every iteration: the actor to its generation layout, the critic to its inference layout.

Each is planned as the ranks will plan it (weight_moves.py), from layouts and shapes alone, in bytes and seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.config.role import Role
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.decisions.layouts import Task, training_layouts
from rlhfuse.decisions.shards import Shard, model_shards
from rlhfuse.decisions.weight_moves import Traffic, minimum_across, move_seconds, plan_moves
from rlhfuse.schedule.ir.ranks import plain_cells, rank_map

DESTINATIONS = {Role.ACTOR: "generation", Role.CRITIC: "critic_inference"}  # the critic's copy goes on to host memory


@dataclass(frozen=True)
class LayoutMove:
    """One move: the model, its task before and after, bytes, and seconds, any copy to host memory included."""

    model: str
    source: str
    target: str
    traffic: Traffic
    seconds: float


def layout_moves(
    tasks: tuple[Task, ...], specs: Mapping[Role, ModelSpec], element_bytes: int, hardware: HardwareSpec
) -> tuple[LayoutMove, ...]:
    """The moves of the models that train, with `hardware.devices_per_node` ranks on a node."""
    rows = {task.name: task for task in tasks}
    ranks, node = rank_map(training_layouts(tasks)), hardware.devices_per_node
    moves = []
    for model, layout in ((task.role, task.layout) for task in tasks if task.training):
        target, head, spec = rows[DESTINATIONS[model]], model.scalar_head, specs[model]
        has = model_shards(spec, layout, ranks.pipelines(model), element_bytes, head)
        wants = model_shards(spec, target.layout, plain_cells(target.layout), element_bytes, head)
        transfers = plan_moves(has, wants, node)
        seconds = move_seconds(transfers, hardware, node)
        if target.name != "generation":
            seconds += _rank_bytes(wants) / hardware.host_bandwidth
        traffic = Traffic.of(transfers, minimum_across(has, wants, node), node)
        moves.append(LayoutMove(model, f"{model}_train {layout}", f"{target.name} {target.layout}", traffic, seconds))
    return tuple(moves)


def _rank_bytes(shards: Sequence[Shard]) -> int:
    """Bytes on the fullest rank."""
    held = Counter()
    for shard in shards:
        held[shard.rank] += shard.bytes
    return max(held.values())
