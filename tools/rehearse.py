"""Rehearse ranks of a run on GPUs, on a machine without: shapes, devices, dtypes and memory, nothing is computed.

    python tools/rehearse.py --config run.yaml --world-size N [--stages | --rank R] [--phase NAME ...] [key=value ...]

Each rank is a process of less than a GB that runs the run's own code at its true sizes. Of the models it needs
config.json alone. --stages (default): one rank of each combination of stages. Prints memory by phase, planned and
measured, and what held it at the peak. Exits with 2 where a phase exceeds the limit of a rank, with 1 where NCCL
would refuse something.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from rehearsal.report import RankReport
from rehearsal.shim import refuse_unless_possible
from rehearsal.stages import PHASES, WHOLE, distinct_ranks, planned_bytes, rehearsal_draft, rehearse

from rlhfuse.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError, run_program
from rlhfuse.config.load import load_config
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.planning.planner import make_plan


def main() -> int:
    parser = argparse.ArgumentParser(description="Rehearse ranks of a run on GPUs, on a machine without.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--world-size", type=int, help="ranks; default WORLD_SIZE, or the product of actor_train")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="this rank alone")
    which.add_argument("--stages", action="store_true", help="one rank of each combination of stages (default)")
    parser.add_argument(
        "--phase", action="append", choices=PHASES, help="this part of an iteration alone, after the start; repeatable"
    )
    args = parser.parse_intermixed_args()
    refuse_unless_possible()
    config = load_config(args.config, args.overrides)
    draft = rehearsal_draft(config, planned_world_size(config, args.world_size))
    if args.rank is not None and not 0 <= args.rank < draft.world_size:
        raise InputError(f"--rank {args.rank} is none of {draft.world_size} ranks; give 0 to {draft.world_size - 1}")
    plan = make_plan(draft)
    limit = plan.report.memory_limit - plan.report.process_bytes  # contexts and communicators are not counted here
    ranks = distinct_ranks(draft) if args.rank is None else (args.rank,)
    print(f"rehearsing rank {', '.join(map(str, ranks))} of {draft.world_size}, one after the other", flush=True)
    reports = []
    for rank in ranks:
        try:
            found = rehearse(Path(args.config), args.overrides, plan, rank, args.phase or WHOLE, _tell)
        except subprocess.CalledProcessError as error:
            return error.returncode
        reports.append(RankReport(found, planned_bytes(draft, plan, rank), limit))
        print(reports[-1].text(), flush=True)
    fullest = max(reports, key=lambda report: report.fullest["peak"])
    print(fullest.table())
    for report in reports:
        for name in report.too_full:
            peak, limit = report.peaks[name]["peak"], report.limit
            has = f"a rank has {limit / 1e9:.1f} GB beside its process"
            print(f"rank {report.found['rank']}: {name} takes {peak / 1e9:.1f} GB, {has}")
    if any(report.too_full for report in reports):
        return EXIT_BAD_INPUT
    return EXIT_FAILED if any(report.found["problems"] for report in reports) else 0


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


def run() -> None:
    """The installed program."""
    run_program(main)


if __name__ == "__main__":
    run()
