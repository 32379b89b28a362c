"""From a checked configuration to a running job and back: the frame around the trainer.

inputs on every rank, the plan by rank 0 (handshake.py) -> process group, watchdog -> trainer
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rlhfuse.base.files import write_json, write_text
from rlhfuse.base.kernel_cache import compile_apart
from rlhfuse.base.launcher import local_rank
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.load import dump_config
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import seconds_of
from rlhfuse.gen.compile_kernels import compile_kernels, kernel_groups
from rlhfuse.models.hf import has_scalar_head
from rlhfuse.models.layers.self_test import self_test
from rlhfuse.monitor.guard import Guard
from rlhfuse.monitor.heartbeat import Limits
from rlhfuse.monitor.run_lock import RUN_LOCK
from rlhfuse.monitor.watchdog import Watchdog
from rlhfuse.parallel import shared_gpu
from rlhfuse.parallel.collectives import from_rank_0, raise_on_all_ranks
from rlhfuse.parallel.connect import GroupUse, connect
from rlhfuse.parallel.device import Device, allow_many_files, choose_device
from rlhfuse.parallel.groups import wait_for_workers
from rlhfuse.parallel.learning_rate import learning_rate
from rlhfuse.planning.plan import Plan
from rlhfuse.run.checkpoint.checkpoint import is_finished
from rlhfuse.run.checkpoint.compatibility import new_run_from
from rlhfuse.run.handshake import Handshake
from rlhfuse.run.preflight import RunInputs, check_inputs
from rlhfuse.run.run_directory import PREEMPTED, run_directory
from rlhfuse.run.run_loop import RunLoop
from rlhfuse.run.trainer import Trainer
from rlhfuse.schedule.io import save_schedule
from rlhfuse.simulator import simulation


def train(config: RunConfig, name: str) -> int:
    """One rank of a job under torchrun, or without it the job of one rank. Returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    if is_finished(config):
        if rank == 0:
            print(finished_line(config), flush=True)
        return 0
    with Guard(rank, config.trainer.grace_seconds, seconds_of(config.trainer.stop_after)) as guard:
        folder = Path(config.trainer.output_dir)
        if rank == 0 and config.trainer.output_dir and not (folder / RUN_LOCK).exists():  # it is nobody else's
            guard.file = folder / PREEMPTED
        return _train(config, name, rank, guard)


def _train(config: RunConfig, name: str, rank: int, guard: Guard) -> int:
    store, world_size = job_store()
    inputs = joint_inputs(config, store, rank, world_size)
    trainer = inputs.config.trainer
    device = choose_device(trainer.device, local_rank(), trainer.threads_per_rank, trainer.share_gpu)
    torch.manual_seed(trainer.seed)
    allow_many_files()
    if device.backend == shared_gpu.SHARED_GPU:
        shared_gpu.register()
    timeout = datetime.timedelta(seconds=trainer.hang_seconds)
    dist.init_process_group(device.process_group, timeout=timeout, store=store, rank=rank, world_size=world_size)
    world = dist.group.WORLD
    assert world is not None, "a process group has just been made"
    connect([GroupUse(world, "all_reduce")], device.torch_device)
    run_dir = run_job(inputs, name, rank, device, guard)
    if rank == 0:
        print(f"done: {run_dir}", flush=True)
    dist.destroy_process_group()
    return 0


def job_store() -> tuple[Store, int]:
    """Store and world size of the job that a launcher started; of a process that was started alone, its own."""
    if "RANK" in os.environ:
        store, _, world_size = next(rendezvous("env://"))
        return store, world_size
    return dist.HashStore(), 1  # pyright: ignore[reportPrivateImportUsage]  # public, but not in torch's list


def joint_inputs(config: RunConfig, store: Store, rank: int, world_size: int) -> RunInputs:
    """The checked inputs with the plan that rank 0 makes, on every rank.

    Raises InputError, or JointError where another rank could not.
    """
    handshake = Handshake(PrefixStore("rlhfuse/start", store), rank, world_size, config.trainer.hang_seconds)
    with handshake.joint():
        return check_inputs(config, world_size, planner=handshake, day=handshake.day())


def run_job(inputs: RunInputs, name: str, rank: int, device: Device, guard: Guard) -> Path:
    """The job on this rank, in a process group that is there; a collective. Returns the run directory."""
    config = inputs.config
    store = PrefixStore(f"rlhfuse/{name}", dist.distributed_c10d._get_default_store())
    limits = Limits(config.trainer.watchdog_seconds, config.trainer.hang_seconds)
    # a connection of its own: the main thread's may be busy
    watched = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack it
    watched.set_timeout(datetime.timedelta(seconds=config.trainer.watchdog_seconds))
    assert dist.group.WORLD is not None
    with Watchdog(watched, rank, inputs.world_size, limits, guard) as watchdog:
        wait_for_workers(dist.group.WORLD)
        compile_at_first_use(inputs, rank, device, watchdog.progress)
        with run_directory(inputs, name, rank) as directory:
            guard.file = directory.path / PREEMPTED if rank == 0 else None
            inputs = begin_run(inputs, directory.path, rank, device)
            trainer = Trainer(inputs, rank, device, store, watchdog.progress, directory.path)
            watchdog.calls_under_way = trainer.calls_under_way
            RunLoop(trainer, directory, watchdog).fit()
            dist.barrier()
    return directory.path


def compile_at_first_use(inputs: RunInputs, rank: int, device: Device, progress: Callable[[str], None]) -> None:
    """Compile what this run needs of numba's kernels and finds in no cache, side by side; a collective.

    One rank does it for its host, and rank 0 what simulations of R_t need; then all can load them.
    """
    dtype, first = getattr(torch, inputs.config.trainer.dtype), not device.is_cuda and local_rank() == 0
    progress("compiling kernels")
    groups = kernel_groups(dtype) if first else []
    if rank == 0:
        groups.append(simulation.kernel_group())
    compile_apart(groups, progress)
    if first:
        compile_kernels(dtype)
    if not device.is_cuda:
        dist.barrier()
        if not first:  # loaded here, or every rank's first generation would wait for this one's
            compile_kernels(dtype)
        check_arithmetic(inputs)


def check_arithmetic(inputs: RunInputs) -> None:
    """Test on this machine that a row's bits do not depend on the batch, at every model's widths."""
    generation = next(task.layout for task in inputs.plan.tasks if task.name == "generation")
    for spec in set(inputs.models.specs.values()):
        self_test(hidden=spec.hidden, mlp=spec.mlp // generation.tp, vocab=spec.vocab // generation.tp)


def finished_line(config: RunConfig) -> str:
    trainer = config.trainer
    done = f"{trainer.output_dir} has its {trainer.iterations} iterations"
    return f"finished already: {done}; for more set trainer.iterations"


def start_line(inputs: RunInputs) -> str:
    """The beginning of the run, for people."""
    if resume := inputs.resume:
        moved = inputs.facts.layout_diff(resume.manifest.facts)
        note = f"; {moved}: equal to about 1e-5 from here on, not bit for bit" if moved else ""
        notes = note, *ended_schedules(inputs.config, str(resume.folder))
        return f"resuming from {resume.folder}: {resume.iteration} iterations are done{'; '.join(notes)}"
    why = "no checkpoint to resume from" if inputs.config.trainer.resume == "auto" else "trainer.resume=never"
    fresh = {role: path for role, path in inputs.models.paths.items() if role.fresh_head and not has_scalar_head(path)}
    heads = (f"; {path} has no value head: the {role}'s begins at 0" for role, path in fresh.items())
    return f"fresh start: {why}{''.join(heads)}"


def ended_schedules(config: RunConfig, where: str) -> Iterator[str]:
    """Models that the run ends without teaching them: it was made longer than their schedules, which go down to 0."""
    for role in config.trained():
        optim, held = getattr(config, role).optim, config.held_iterations(role)
        since, last = optim.lr_decay_iterations + held, config.trainer.iterations - 1
        if since <= last and learning_rate(optim, last - held) == 0:
            since = f"the learning rate of the {role} is 0 from iteration {since} on"
            yield f"{since}, where its schedule ends: {new_run_from(where)}"


def prompts_line(inputs: RunInputs) -> str:
    """Prompts that were read, for people, with a warning where an iteration draws some twice."""
    wanted = inputs.config.rollout.prompts_per_iteration
    shown = [str(inputs.prompts)] if len(inputs.prompts) else []
    if 0 < len(inputs.prompts) < wanted:
        shown.append(f"an iteration draws {wanted}: some more than once")
    if len(inputs.val_prompts):
        shown.append(f"held out for evaluation: {inputs.val_prompts}")
    return "; ".join(shown)


def sharing_line(config: RunConfig) -> str:
    """What holds where ranks share a GPU, for people: a line, or nothing."""
    if not config.trainer.share_gpu:
        return ""
    tp = ParallelLayout.parse(config.parallel.generation).tp
    graphs = f"; rollout.cuda_graphs=false: t{tp} adds up over the host, which no graph holds" if tp > 1 else ""
    return f"trainer.share_gpu: the ranks of a node take turns on one GPU, so no time or rate means anything{graphs}\n"


def begin_run(inputs: RunInputs, run_dir: Path, rank: int, device: Device) -> RunInputs:
    """Write and print the run's beginning on rank 0; a collective. Returns the inputs with the costs of the plan."""
    plan = inputs.plan
    with raise_on_all_ranks():
        if rank == 0:
            write_start(run_dir, plan)
            print(start_line(inputs), flush=True)
            print(f"run directory: {run_dir}")
            print(f"device: {device.torch_device} ({device.backend}), {prompts_line(inputs)}")
            print(sharing_line(inputs.config), end="")
            print("".join(f"{note}\n" for note in inputs.notes), end="")
            whole = f"{plan.summary}\n{plan.likeliest.text()}"
            if inputs.resume:  # the whole was printed when it began
                plan_file, seconds = run_dir / "plan.json", plan.iteration_seconds
                whole = f"{plan.title}; {seconds:.4g} s an iteration: {plan_file} holds the rest"
            print(whole, flush=True)
    costs = from_rank_0(plan.costs)
    return inputs if rank == 0 else replace(inputs, plan=replace(plan, costs=costs))


def write_start(run_dir: Path, plan: Plan) -> None:
    """Write config.yaml, schedule.json and plan.json. Raises InputError naming the file that cannot be written."""
    write_text(run_dir / "config.yaml", dump_config(plan.config))
    others = [schedule for schedule in plan.schedules.values() if schedule is not plan.likeliest]
    save_schedule(run_dir / "schedule.json", plan.likeliest, {"source": plan.document["schedule"]["source"]}, others)
    write_json(run_dir / "plan.json", plan.document)
