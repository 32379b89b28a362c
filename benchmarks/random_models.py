"""One rank of a benchmark of several: its process group of one thread each, and random Llamas on it."""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist

from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.build import build_model
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid


def join_ranks(rank: int, world: int) -> None:
    """Join the other ranks, with one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def barrier() -> None:
    dist.all_reduce(torch.zeros(1))


def random_llama(
    name: str,
    spec: ModelSpec,
    grid: ModelGrid,
    maker: GroupMaker,
    rank: int,
    device: Device,
    scalar_head: bool,
    seed: int,
) -> torch.nn.Module:
    """This rank's part of a model, with weights as a fresh Llama has them."""
    groups = maker.for_model(name, grid, rank)
    model = build_model(spec, grid, groups, rank, scalar_head=scalar_head, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model
