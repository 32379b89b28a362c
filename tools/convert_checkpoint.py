"""Write the models of a checkpoint in Hugging Face layout; no ranks are launched.

    python tools/convert_checkpoint.py runs/my-run --out hf                          newest: hf/actor, hf/critic
    python tools/convert_checkpoint.py runs/my-run/checkpoints/iteration-20 --out hf --role actor --shard-gb 5

Every file of the checkpoint is held against its checksum first. Exit code 2: bad input, one line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from program import run_program

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.role import LEARNERS


def main() -> int:
    parser = argparse.ArgumentParser(description="Export actor and critic of a checkpoint in Hugging Face layout.")
    parser.add_argument("checkpoint", help="a run directory (its newest checkpoint) or its checkpoints/iteration-N")
    parser.add_argument("--out", required=True, help="folder to write; with --role the model itself, else one each")
    parser.add_argument("--role", choices=LEARNERS, help="one model alone; default: all that were trained")
    parser.add_argument("--like", help="folder with config and tokenizer; default: the path the run had for the role")
    parser.add_argument("--shard-gb", type=float, help="largest file in GB (1e9 bytes); default: one file")
    parser.add_argument("--force", action="store_true", help="replace folders that exist")
    args = parser.parse_args()
    if args.shard_gb is not None and not args.shard_gb > 0:
        raise InputError(f"--shard-gb {args.shard_gb} must be above 0")
    if args.like and not args.role:
        raise InputError("--like is the folder of one model; say which with --role")

    from checkpoint_conversion import (  # torch loads only for arguments that can be read
        convert,
        open_checkpoint,
    )

    from rlhfuse.base.files import check_output_folder

    out = Path(args.out)
    checkpoint = open_checkpoint(Path(args.checkpoint))
    roles = (args.role,) if args.role else checkpoint.open_reader().roles()
    folders = {role: out if args.role else out / role for role in roles}
    for folder in folders.values():
        check_output_folder(folder, args.force)
    for role, folder in folders.items():
        convert(
            checkpoint,
            role,
            folder,
            like=Path(args.like) if args.like else None,
            shard_bytes=int(args.shard_gb * 1e9) if args.shard_gb else None,
            force=args.force,
        )
        print(f"{role} after {checkpoint.iteration} iterations: {folder}")
    return 0


if __name__ == "__main__":
    run_program(main)
