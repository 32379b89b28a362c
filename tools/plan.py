"""Print the plan of a run; nothing is launched.

    python tools/plan.py --config run.yaml [key=value ...] [--world-size N] [--json] [--problem problem.json]

Layouts, batch arithmetic, memory per rank and phase, predicted times, the training schedule, R_t, and why.
--problem writes the training schedule's problem for tools/search_schedule.py: ticks of a microsecond, bytes. Exits
with 2 and the equation that fails where the config cannot run on so many ranks.
"""

from __future__ import annotations

import argparse
import json
import os

from rlhfuse.config import load_config
from rlhfuse.errors import InputError, run_program
from rlhfuse.schedule.io import write_text
from rlhfuse.simulator.lengths import load_lengths
from rlhfuse.simulator.planner import plan_run, read_specs
from rlhfuse.spec import ParallelLayout


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the plan of a run; nothing is launched.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--world-size", type=int, help="ranks; default WORLD_SIZE, or the product of actor_train")
    parser.add_argument("--lengths", metavar="FILE[:COLUMN]", help="past lengths, for predictions and R_t")
    parser.add_argument("--json", action="store_true", help="print plan.json instead of text")
    parser.add_argument("--problem", metavar="FILE", help="also write the problem of one mini-batch's schedule here")
    args = parser.parse_intermixed_args()
    config = load_config(args.config, args.overrides)
    lengths = load_lengths(args.lengths, default_prompt=config.data.max_prompt_tokens).lengths if args.lengths else None
    world_size = args.world_size if args.world_size is not None else _default_world_size(config.parallel.actor_train)
    plan, schedule = plan_run(config, read_specs(config), world_size, lengths=lengths)
    if args.problem:
        write_text(args.problem, json.dumps(schedule.problem.to_dict(), indent=1) + "\n")
    print(json.dumps(plan.to_dict(), indent=1) if args.json else plan.render())
    return 0


def _default_world_size(actor_train: str) -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text:
        return ParallelLayout.parse(actor_train).size
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"WORLD_SIZE={text!r} is no number of ranks; unset it or give --world-size")
    return int(text)


if __name__ == "__main__":
    run_program(main)
