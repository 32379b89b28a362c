"""Train with PPO, generation fused with inference and actor training fused with critic training.

    torchrun --nproc-per-node 4 tools/train_ppo.py --config examples/quickstart.yaml [key=value ...]
    python tools/train_ppo.py --config my_run.yaml                              one rank needs no torchrun
    python tools/train_ppo.py --config examples/quickstart.yaml --dry-run       check and print the plan, launch nothing

The same program runs on CPUs (gloo) and GPUs (NCCL, flash-attn where installed). Everything is checked before a
process group exists: bad input ends all ranks with exit code 2 and one line, from rank 0 or the rank that met it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

from rlhfuse.base.cuda_environment import set_cuda_environment

set_cuda_environment(os.environ)  # before any of the following imports torch

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.config.load import load_config
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.parallel.first_error import prints_error


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with PPO and both fusions; several ranks under torchrun.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, launch nothing")
    parser.add_argument("--world-size", type=int, help="ranks to plan for in a dry run; default: as actor_train says")
    args = parser.parse_intermixed_args()
    config = load_config(args.config, args.overrides)

    from rlhfuse.run.launch import dry_run, train  # torch and Megatron load only for a config that can be read

    if args.dry_run:
        return dry_run(config, args.world_size)
    if "RANK" not in os.environ and (ranks := planned_world_size(config, None)) > 1:
        command = shlex.join(("torchrun", "--nproc-per-node", str(ranks), *sys.argv))
        raise InputError(f"this is a run of {ranks} ranks (parallel.actor_train), which torchrun starts: {command}")
    return train(config, Path(args.config).stem)


def run() -> None:
    """The installed program."""
    run_program(main, tear_down=False, prints=prints_error)


if __name__ == "__main__":
    run()
