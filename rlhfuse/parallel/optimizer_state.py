"""What a model's stages and their ZeRO-1 optimizer own on this rank, as fragments of whole parameters, and back.

    main                   float32 main weights of this rank's shard; the weights themselves are these, rounded
    exp_avg, exp_avg_sq    Adam's state of the shard; absent before the first step

The only file that knows how Megatron's DistributedOptimizer (0.16.1) finds a parameter's shard. No collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.parallel.fragments import Fragment, Place
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.parallel.reshard import located_shards

MOMENTS = ("exp_avg", "exp_avg_sq")
FUSED = "FusedAdam"  # Apex's, or of another package: a group of parameters has the step, not each parameter
Lookup = Callable[[str, str, Place], Tensor]  # (parameter, kind, place) -> flat values in host memory
StepOf = Callable[[str], int]  # parameter -> step of Adam


def check_exportable(optimizer: ModelOptimizer) -> None:
    """Raise InputError where the optimizer is no Adam of torch, and no FusedAdam."""
    adam = _zero(optimizer).optimizer
    if "SGD" in type(adam).__name__:
        raise InputError(
            "optim.name=sgd has no checkpoints; set trainer.save_every=0 and trainer.resume=never, or use adam"
        )
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW) and type(adam).__name__ != FUSED:
        raise InputError(
            f"the state of {type(adam).__module__}.{type(adam).__name__} cannot be saved or resumed; set "
            "trainer.save_every=0 and trainer.resume=never"
        )


def export_state(optimizer: ModelOptimizer) -> list[Fragment]:
    """What this rank owns; the tensors are the live ones, not copies."""
    adam = _zero(optimizer).optimizer
    fragments = []
    for name, parameter, part, owned in _parameters(optimizer):
        if not owned or (shard := _shard(optimizer, parameter, part)) is None:
            continue
        main, place, group = shard
        state = adam.state[main]
        moments = {kind: state[kind].detach().flatten() for kind in MOMENTS if state}
        step = int(state["step"] if "step" in state else group["step"]) if state else 0
        fragments.append(Fragment(name, place, step, {"main": main.detach().flatten(), **moments}))
    return fragments


@torch.no_grad()
def import_state(optimizer: ModelOptimizer, lookup: Lookup, step_of: StepOf) -> None:
    """Fill weights and optimizer, of whatever layout, with what `lookup` finds, which raises ValueError otherwise."""
    optimizer.states.come_back()
    optimizer.states.wait()
    adam = _zero(optimizer).optimizer
    for name, parameter, part, _ in _parameters(optimizer):
        weights = lookup(name, "main", part)
        parameter.copy_(weights.view(parameter.shape))
        if (shard := _shard(optimizer, parameter, part)) is None:
            continue
        main, place, group = shard
        main.copy_(weights[place.start : place.stop])
        state = adam.state[main]
        state.clear()
        if step := step_of(name):
            if type(adam).__name__ == FUSED:
                group["step"] = step  # equal for all parameters: none is left out of a step
            else:
                place_of_step = main.device if group.get("fused") else "cpu"  # where torch's Adam wants it
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=place_of_step)
            for kind in MOMENTS:
                state[kind] = lookup(name, kind, place).to(main.device, copy=True)
        else:
            group.pop("step", None)


def _zero(optimizer: ModelOptimizer) -> DistributedOptimizer:
    """Megatron wraps the one optimizer of a model without experts in a chain."""
    (zero,) = optimizer.optimizer.chained_optimizers
    return zero


def _parameters(optimizer: ModelOptimizer) -> Iterator[tuple[str, torch.nn.Parameter, Place, bool]]:
    """(global name, parameter, the part of it that lies here, whether this rank saves it).

    Of a parameter that every tensor rank holds whole, tensor rank 0 saves it.
    """
    for module in optimizer.modules.values():
        group = module.module.pg_collection.tp
        for name, located in located_shards([module]).items():
            parameter, dim = located.weight, located.dim
            shared = bool(getattr(parameter, "tensor_model_parallel", False))
            shape = list(parameter.shape)
            shape[dim] *= dist.get_world_size(group) if shared else 1
            part = Place(tuple(shape), dim, located.shard.segments, 0, math.prod(parameter.shape))
            assert isinstance(parameter, torch.nn.Parameter)
            yield name, parameter, part, shared or dist.get_rank(group) == 0


def _shard(
    optimizer: ModelOptimizer, parameter: torch.nn.Parameter, part: Place
) -> tuple[Tensor, Place, dict[str, Any]] | None:
    """Flat main weights of this rank's ZeRO-1 shard, where they lie, and the optimizer's group that they are in.

    None where it has nothing of the parameter.
    """
    zero = _zero(optimizer)
    if parameter not in zero.model_param_group_index_map:
        return None
    group, place = zero.model_param_group_index_map[parameter]
    inside = zero._get_model_param_range_map(parameter)["param"]
    rows = zero.optimizer.param_groups[group]
    return rows["params"][place], replace(part, start=inside.start, stop=inside.end), rows
