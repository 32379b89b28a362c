"""A whole run on a pool of ranks, without the seconds of torchrun and of a first start."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from rlhfuse.config.load import load_config


def run_here(rank: int, config: Path, out: Path, *overrides: str, staged: bool = False) -> None:
    """The training program on this rank; the world is made anew, over gloo or, `staged`, through the staging of ranks
    that share a GPU."""
    from rlhfuse.parallel import shared_gpu
    from rlhfuse.parallel.device import Device
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    device = Device(torch.device("cpu"), shared_gpu.SHARED_GPU if staged else "gloo")
    if staged and device.backend not in dist.Backend.backend_list:
        shared_gpu.register(stages=lambda tensor: True)
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    dist.destroy_process_group()
    again, timeout = dist.PrefixStore(out.name, store), datetime.timedelta(seconds=540)
    dist.init_process_group(device.process_group, store=again, rank=rank, world_size=world, timeout=timeout)
    settings = with_device(load_config(config, [*overrides, f"trainer.output_dir={out}"]))
    run_job(check_inputs(settings, world), out.name, rank, device)
