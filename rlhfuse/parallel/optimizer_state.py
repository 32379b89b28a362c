"""What a model's stage and its ZeRO-1 optimizer hold on this rank, as named tensors, and back.

    weights.<parameter>      the module's own weights
    main.<parameter>         float32 main weights of this rank's shard; in float32 they are views of the weights,
                             and are left out
    step|exp_avg|exp_avg_sq.<parameter>      Adam's state of the shard; absent before the first step

A model with several stages on this rank has stage<number>.<parameter> for each of them.

The only file that knows how Megatron's DistributedOptimizer (0.16.1) finds a parameter's shard. Every rank
exports and imports alone: there is no collective here. Knows nothing of files.
"""

from __future__ import annotations

from typing import Iterator, Mapping

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlhfuse.errors import InputError
from rlhfuse.parallel.optimizer import ModelOptimizer


def check_exportable(optimizer: ModelOptimizer) -> None:
    """Raise InputError where the optimizer is not torch's Adam: fused Adams keep their step elsewhere."""
    adam = _zero(optimizer).optimizer
    if "SGD" in type(adam).__name__:
        raise InputError(
            "optim.name=sgd has no checkpoints; set trainer.save_every=0 and trainer.resume=never, or use adam"
        )
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        raise InputError(
            f"the state of {type(adam).__module__}.{type(adam).__name__} cannot be saved or resumed; remove Apex and "
            "Transformer Engine from the environment, or set trainer.save_every=0 and trainer.resume=never"
        )


def export_state(optimizer: ModelOptimizer) -> dict[str, Tensor]:
    """This rank's tensors by the names above; they are the live ones, not copies."""
    tensors = {f"weights.{name}": parameter.detach() for name, parameter in _parameters(optimizer).items()}
    adam = _zero(optimizer).optimizer
    for name, parameter, main in _shards(optimizer):
        if not _is_view(main, parameter):
            tensors[f"main.{name}"] = main.detach()
        for kind, value in adam.state[main].items():
            tensors[f"{kind}.{name}"] = value
    return tensors


@torch.no_grad()
def import_state(optimizer: ModelOptimizer, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `export_state`, into a model and optimizer of the same layout.

    Raises ValueError naming the tensor that is missing, foreign or of another shape.
    """
    left = set(tensors)

    def take(name: str, like: Tensor) -> Tensor:
        value = tensors[name] if name in left else None
        if value is None or value.shape != like.shape:
            found = "missing" if value is None else f"of shape {list(value.shape)}"
            raise ValueError(f"{name} is {found}; this rank needs shape {list(like.shape)}")
        left.discard(name)
        return value

    for name, parameter in _parameters(optimizer).items():
        parameter.copy_(take(f"weights.{name}", parameter))
    adam = _zero(optimizer).optimizer
    for name, parameter, main in _shards(optimizer):
        if not _is_view(main, parameter):
            main.copy_(take(f"main.{name}", main))
        state = adam.state[main]
        state.clear()
        if f"step.{name}" in left:
            state["step"] = take(f"step.{name}", torch.empty(())).clone()  # Adam wants it in host memory
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = take(f"{kind}.{name}", main).to(main.device, copy=True)
    if left:
        raise ValueError(f"{len(left)} tensors belong to no parameter of this rank, the first is {min(left)}")


def _zero(optimizer: ModelOptimizer) -> DistributedOptimizer:
    """Megatron wraps the one optimizer of a model without experts in a chain."""
    (zero,) = optimizer.optimizer.chained_optimizers
    return zero


def _parameters(optimizer: ModelOptimizer) -> dict[str, torch.nn.Parameter]:
    stages = optimizer.modules
    return {
        f"stage{stage}.{name}" if len(stages) > 1 else name: parameter
        for stage, module in stages.items()
        for name, parameter in module.module.named_parameters()
    }


def _shards(optimizer: ModelOptimizer) -> Iterator[tuple[str, torch.nn.Parameter, Tensor]]:
    """(name, parameter, flat main weights) of every parameter that has a part in this rank's shard."""
    zero = _zero(optimizer)
    for name, parameter in _parameters(optimizer).items():
        if parameter in zero.model_param_group_index_map:
            group, place = zero.model_param_group_index_map[parameter]
            yield name, parameter, zero.optimizer.param_groups[group]["params"][place]


def _is_view(main: Tensor, parameter: Tensor) -> bool:
    return main.dtype == parameter.dtype and main.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
