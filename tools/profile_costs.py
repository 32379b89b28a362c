"""Measure what a run's work costs on this machine, and write profile.json for fusion.profile.

    torchrun --nproc-per-node 4 tools/profile_costs.py --config run.yaml --out profile.json [key=value ...]
    python tools/profile_costs.py --config run.yaml --out profile.json            alone: one instance
    torchrun --nproc-per-node 4 tools/profile_costs.py --config run.yaml --out profile.json --tensor 1,2,4

Use as many ranks as the run has: all instances measure at the same time, as they work in a run. Models get random
weights of the configured shapes. --tensor measures all tasks at each of these tensor degrees, whatever the config's
layouts: any layouts of these degrees can then be priced.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

from rlhfuse.base.cuda_environment import set_cuda_environment

set_cuda_environment(os.environ)  # before any of the following imports torch

from cost_profiles.points import check_world, with_tensor
from job_place import check_place
from program import prints_error, run_program

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import MICROBATCH_TOKENS, completed, refuse_auto, searched_keys
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.profile_files import TensorProfiles
from rlhfuse.planning.job import Job
from rlhfuse.planning.settle import settle_but_layouts


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a run's work costs on this machine.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--out", required=True, help="profile.json to write")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="measure no longer than this")
    parser.add_argument("--tensor", metavar="DEGREES", help="such as 1,2,4; default: the degrees of the config")
    parser.add_argument("--force", action="store_true", help="replace an existing --out")
    args = parser.parse_intermixed_args()
    if not args.limit > 0:
        raise InputError(f"--limit {args.limit} must be above 0 seconds")
    out = Path(args.out)
    if out.exists() and not args.force:
        raise InputError(f"--out {out} exists; give another name or --force to replace it")
    if not out.resolve().parent.is_dir():
        raise InputError(f"--out {out}: the folder {out.resolve().parent} does not exist; make it first")
    return measure(load_config(args.config, args.overrides), out, args.limit, degrees_of(args.tensor))


def degrees_of(text: str | None) -> tuple[int, ...]:
    """Ascending, each once; () where none are named."""
    words = text.split(",") if text is not None else []
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise InputError(f"--tensor {text}: {word!r} is not a tensor degree; give some such as 1,2,4")
    return tuple(sorted(set(map(int, words))))


def measure(config: RunConfig, out: Path, limit_seconds: float, degrees: tuple[int, ...] = ()) -> int:
    """One rank of the measurement; rank 0 writes."""
    from rlhfuse.run import preflight

    specs = read_specs(config)
    if "RANK" in os.environ:
        check_place()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if searched := bool(degrees and searched_keys(config)):  # layouts are not known, nor needed
        known = config.with_(parallel={"sequence_parallel": False}, trainer={"recompute": "none"})
        config = with_tensor(known, specs, degrees[0], world)
    open_ = [key for key in searched_keys(config) if key != MICROBATCH_TOKENS]
    refuse_auto(open_, "costs are measured at tensor degrees that are known; name them, such as --tensor 1,2,4")
    size = ParallelLayout.parse(config.parallel.actor_train).size
    found = preflight.this_host(config.trainer), preflight.device_of(config.trainer)
    run = settle_but_layouts(Job(config, specs, size, *found, preflight.longest_prompt(config, specs)))
    if not searched:
        run.rules.given_rows()
    config = completed(run.config)
    configs = [with_tensor(config, specs, degree, world) for degree in degrees] or [config]
    for one in configs:
        check_world(one, world)

    import torch.distributed as dist
    from cost_profiles.profiler import Profiler

    from rlhfuse.base.launcher import local_rank
    from rlhfuse.parallel.connect import GroupUse, connect
    from rlhfuse.parallel.device import allow_many_files, choose_device
    from rlhfuse.run.launch import job_store

    device = choose_device(config.trainer.device, local_rank(), config.trainer.threads_per_rank)
    allow_many_files()
    timeout = datetime.timedelta(seconds=config.trainer.hang_seconds)
    store, world_size = job_store()
    dist.init_process_group(device.process_group, timeout=timeout, store=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    connect([GroupUse(dist.group.WORLD, "all_reduce")], device.torch_device)
    began = time.monotonic()

    def say(line: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    made = []
    for one in configs:
        if degrees:
            say(f"tensor degree {degrees[len(made)]}")
        made.append(Profiler(one, specs, device, limit_seconds / len(configs), say).run())
        gc.collect()  # its models, before those of the next degree
    costs = TensorProfiles(tuple(made)) if degrees else made[0]
    if rank == 0:
        write_json(out, costs.to_dict())
        print(f"{costs}\nwritten: {out}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_program(main, tear_down=False, prints=prints_error)
