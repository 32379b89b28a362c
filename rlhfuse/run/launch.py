"""From a checked configuration to a running job and back: the frame around the trainer.

    checks on every rank -> process group, watchdog -> schedule and plan by rank 0, sent to all -> trainer

The schedule is searched by rank 0 for a few seconds and sent as text; every rank verifies what it was sent.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlhfuse.checkpoint.checkpoint import is_finished
from rlhfuse.config.settings import RunConfig, dump_config
from rlhfuse.costs.hardware import gpu_by_name
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.errors import writing
from rlhfuse.files import write_text
from rlhfuse.gen.cpu.warm_up import compile_kernels, compile_kernels_apart
from rlhfuse.models.cpu import invariance
from rlhfuse.models.hf import has_scalar_head
from rlhfuse.monitor.watchdog import Limits, Watchdog
from rlhfuse.parallel.collectives import all_gather_bytes, raise_on_all_ranks
from rlhfuse.parallel.device import Device, allow_many_files, choose_device, local_rank
from rlhfuse.parallel.groups import connect
from rlhfuse.planning.plan import Plan, save_plan
from rlhfuse.planning.planner import make_plan, plan_run
from rlhfuse.run.preflight import Prepared, prepare
from rlhfuse.run.trainer import Trainer
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.search import worker as search_worker


def dry_run(config: RunConfig, world_size: int | None) -> int:
    """Check everything and print the plan; launches nothing."""
    name_device(config)
    if is_finished(config):
        print(finished_line(config))
        return 0
    world = planned_world_size(config, world_size)
    prepared = prepare(config, world)
    print(start_line(prepared))
    print(prompts_line(prepared))
    print(make_plan(config, prepared.checkpoints.specs, world).render())
    return 0


def train(config: RunConfig, name: str) -> int:
    """One rank of a job under torchrun. Returns the exit code."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name_device(config)
    if is_finished(config):
        if rank == 0:
            print(finished_line(config), flush=True)
        return 0
    prepared = prepare(config, world)
    device = choose_device(config.trainer.device, local_rank(), config.trainer.threads_per_rank)
    if not device.is_cuda:
        check_arithmetic(prepared)
    torch.manual_seed(config.trainer.seed)
    allow_many_files()
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=config.trainer.hang_seconds))
    connect([dist.group.WORLD], device.torch_device)
    run_dir = run_job(prepared, name, rank, device)
    if rank == 0:
        print(f"done: {run_dir}", flush=True)
    dist.destroy_process_group()
    return 0


def run_job(prepared: Prepared, name: str, rank: int, device: Device) -> Path:
    """The job on this rank, in a process group that is there; a collective. Returns the run directory."""
    config = prepared.config
    store = dist.PrefixStore(f"rlhfuse/{name}", dist.distributed_c10d._get_default_store())
    limits = Limits(config.trainer.watchdog_seconds, config.trainer.hang_seconds)
    watched = store.clone()  # a connection of its own: the main thread's may be busy
    watched.set_timeout(datetime.timedelta(seconds=config.trainer.watchdog_seconds))
    with Watchdog(watched, rank, prepared.world_size, limits) as watchdog:
        if not device.is_cuda:
            watchdog.progress("compiling the engine's kernels")
            load_kernels(config)
        schedule, plan, run_dir = settle(prepared, name, rank, device)
        trainer = Trainer(prepared, plan, schedule, rank, device, store, watchdog, run_dir)
        trainer.fit()
        dist.barrier()
    return run_dir


def load_kernels(config: RunConfig) -> None:
    """The first rank of every host has the engine's CPU kernels compiled, unless they are cached; then all can load."""
    if local_rank() == 0:
        dtype = getattr(torch, config.trainer.dtype)
        compile_kernels_apart(dtype)
        compile_kernels(dtype)
    dist.barrier()


def name_device(config: RunConfig) -> None:
    """Replace trainer.device=auto by what this machine has, and trainer.hardware=auto by a GPU that is known.

    Plan and run must be about the same device.
    """
    trainer = config.trainer
    if trainer.device == "auto":
        trainer.device = "cuda" if torch.cuda.is_available() else "cpu"
    if trainer.hardware == "auto" and trainer.device == "cuda" and torch.cuda.is_available():
        trainer.hardware = gpu_by_name(torch.cuda.get_device_name()) or "auto"


def check_arithmetic(prepared: Prepared) -> None:
    """Test on this machine that a row's bits do not depend on the batch, at every model's widths."""
    generation = next(task.layout for task in prepared.tasks if task.name == "generation")
    for spec in set(prepared.checkpoints.specs.values()):
        invariance.self_test(hidden=spec.hidden, mlp=spec.mlp // generation.tp, vocab=spec.vocab // generation.tp)


def finished_line(config: RunConfig) -> str:
    trainer = config.trainer
    done = f"{trainer.output_dir} has its {trainer.iterations} iterations"
    return f"finished already: {done}; for more set trainer.iterations"


def start_line(prepared: Prepared) -> str:
    """Where the run begins, for people."""
    if prepared.resume:
        moved = prepared.facts.layout_diff(prepared.resume.manifest.facts)
        note = f"; {moved}: equal to about 1e-5 from here on, not bit for bit" if moved else ""
        return f"resuming from {prepared.resume.folder}: {prepared.resume.iteration} iterations are done{note}"
    why = "no checkpoint to resume from" if prepared.config.trainer.resume == "auto" else "trainer.resume=never"
    critic = prepared.checkpoints.paths.get("critic")
    headless = critic and not has_scalar_head(critic)
    return f"fresh start: {why}" + (f"; {critic} has no value head: the critic's begins at 0" if headless else "")


def prompts_line(prepared: Prepared) -> str:
    """What was read, for people; and whether an iteration must draw a prompt twice."""
    wanted = prepared.config.rollout.prompts_per_iteration
    if len(prepared.prompts) >= wanted:
        return str(prepared.prompts)
    return f"{prepared.prompts}; an iteration draws {wanted}: some more than once"


def settle(prepared: Prepared, name: str, rank: int, device: Device) -> tuple[Schedule, Plan, Path]:
    """Schedule, plan and run directory, the same on every rank; rank 0 writes and prints them."""
    config = prepared.config
    told = b""
    with raise_on_all_ranks():
        if rank == 0:
            run_dir = Path(config.trainer.output_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
            if config.fusion.intra_stage and not config.fusion.schedule:
                search_worker.compile_kernels_apart()  # of the search that this plan begins with
            plan, schedule = plan_run(config, prepared.checkpoints.specs, prepared.world_size)
            write_start(run_dir, config, plan, schedule)
            print(start_line(prepared), flush=True)
            print(f"run directory: {run_dir}")
            print(f"device: {device.torch_device} ({device.backend}), {prompts_line(prepared)}")
            print(f"{plan.render()}\n{schedule.text()}", flush=True)
            told = json.dumps([str(run_dir), plan.to_dict(), schedule.text()]).encode()
    folder, plan_dict, text = json.loads(all_gather_bytes(told)[0])
    schedule = Schedule.parse(prepared.problem, text)
    verify(lower(schedule, prepared.ranks, tied=prepared.tied), schedule, prepared.ranks, tied=prepared.tied)
    return schedule, Plan.from_dict(plan_dict), Path(folder)


def write_start(run_dir: Path, config: RunConfig, plan: Plan, schedule: Schedule) -> None:
    """What a run is before its first iteration. Raises InputError naming the file that cannot be written."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    write_text(run_dir / "config.yaml", dump_config(config))
    save_schedule(run_dir / "schedule.json", schedule, {"source": plan.schedule.source})
    save_plan(plan, run_dir / "plan.json")
