"""Train with PPO, generation fused with inference and actor training fused with critic training.

    rlhfuse-train --ranks 4 --config examples/quickstart.yaml [key=value ...]   four processes of this machine
    rlhfuse-train --config examples/quickstart.yaml --dry-run                   check and print the plan, launch nothing
    torchrun ... tools/train_ppo.py --config run.yaml                           one rank of a job of several machines

The same program runs on CPUs (gloo) and GPUs (NCCL, flash-attn where installed). Everything is checked before a
process group exists: bad input ends all ranks with exit code 2 and one line, from rank 0 or the rank that met it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

from rlhfuse.base.cuda_environment import set_cuda_environment
from rlhfuse.base.launcher import begin_rank

begin_rank()
set_cuda_environment(os.environ)  # before any of the following imports torch

from job_place import check_interfaces, check_place, leave_other_jobs
from program import prints_error, run_program

from rlhfuse.base.errors import InputError
from rlhfuse.base.launcher import SAFE_PATH, torchrun_is_parent
from rlhfuse.config.load import load_config
from rlhfuse.decisions.layouts import planned_world_size


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with PPO and both fusions.")
    parser.add_argument("--config", help="YAML file of the run; without, all settings are key=value")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--ranks", type=int, help="check, then start so many processes on this machine, as torchrun")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, launch nothing")
    parser.add_argument("--world-size", type=int, help="ranks to plan for in a dry run; default: as actor_train says")
    parser.add_argument(
        "--try-reward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="call reward.function on one row where everything is checked first (--dry-run, --ranks)",
    )
    args = parser.parse_intermixed_args()
    if args.ranks is not None and args.ranks < 1:
        raise InputError(f"--ranks {args.ranks}: at least one process is needed")
    os.environ[SAFE_PATH] = "1"  # for what starts from here on: the workers of rewards and tools
    launches = args.ranks is not None or args.dry_run or "RANK" not in os.environ
    if launches and not torchrun_is_parent():
        leave_other_jobs("LOCAL_WORLD_SIZE" if args.dry_run else "")  # a plan asks how many ranks a node has
    elif args.ranks is not None:
        raise InputError(f"--ranks {args.ranks} starts ranks, and torchrun has started this one; leave out one of them")
    elif not args.dry_run:
        check_place()
    config = load_config(args.config, args.overrides)
    own = Path(args.config or "").parent.resolve()
    named = config.trainer.output_dir and not any(word.startswith("trainer.output_dir=") for word in args.overrides)
    if named and (own / "checkpoints").is_dir() and own != Path(config.trainer.output_dir).resolve():
        fix = f"set trainer.output_dir={own} to go on there"
        raise InputError(f"{args.config} lies in a run that was moved from {config.trainer.output_dir}; {fix}")

    from run_check import check_start, dry_run  # torch loads for a readable config only

    from rlhfuse.run.launch import train
    from rlhfuse.run.preflight import device_of

    if args.dry_run:
        return dry_run(config, args.world_size or args.ranks, args.try_reward)
    if args.ranks is not None:
        given = ["--config", args.config] if args.config else []
        on_gpus = check_start(config, args.ranks, args.try_reward)
        check_interfaces(on_gpus)
        from rank_starter import start_ranks  # of no use to a rank

        program = [__file__, *given, *args.overrides]
        return start_ranks(args.ranks, program, config.trainer.grace_seconds, on_gpus)
    if "RANK" not in os.environ and (ranks := planned_world_size(config, None)) > 1:
        program = ("python", sys.argv[0]) if sys.argv[0].endswith(".py") else (Path(sys.argv[0]).name,)
        command = shlex.join((*program, "--ranks", str(ranks), *sys.argv[1:]))
        raise InputError(f"this is a run of {ranks} ranks (parallel.actor_train): {command}")
    check_interfaces(device_of(config.trainer) == "cuda")
    return train(config, Path(args.config or "run").stem)


run = partial(run_program, main, tear_down=False, prints=prints_error)  # the installed program

if __name__ == "__main__":
    run()
