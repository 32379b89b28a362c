"""Gradients of which each tensor rank has only its own summand, although the weight is whole on all of them.

A norm over queries and keys sees the heads of its rank; under sequence parallelism every norm sees the tokens of its
rank. Who builds a model marks such weights; before their gradients go to other ranks, or into a norm, they are summed
over the tensor ranks of the stage. Megatron's `finalize_model_grads` does the same within one call that also reduces
everything else. Knows nothing of layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_MARK = "partial_over_tensor_ranks"


def mark_partial(parameter: torch.nn.Parameter) -> None:
    setattr(parameter, _MARK, True)


def sum_partial_gradients(module: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Sum the `main_grad` of all marked weights over the group in one blocking all-reduce; nothing if there are none."""
    gradients = [p.main_grad for p in module.parameters() if getattr(p, _MARK, False)]
    if not gradients:
        return
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(together, group=tp_group)
    for gradient, summed in zip(gradients, together.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(summed.view_as(gradient))
