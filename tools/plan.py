"""Print the plan of a run; nothing is launched.

    python tools/plan.py --config run.yaml [key=value ...] [--world-size N] [--json] [--problem problem.json]

Layouts, batch arithmetic, memory per rank and phase, predicted times, the training schedule, R_t, and why.
--problem writes the training schedule's problem for tools/search_schedule.py: ticks of a microsecond, bytes. Exits
with 2 and the equation that fails, or the memory that is missing, where the config cannot run on so many ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here

from rlhfuse.base.errors import run_program
from rlhfuse.base.files import write_json
from rlhfuse.config.load import load_config
from rlhfuse.config.role import Role
from rlhfuse.config.rules import idle_settings
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.models.tokenizer import has_tokenizer, load_tokenizer, resolve_tokens
from rlhfuse.planning.draft import draft_plan, read_specs
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.search.resolve import resolve_layouts
from rlhfuse.simulator.lengths import load_lengths

NVIDIA_DRIVER = Path("/proc/driver/nvidia")


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
    world_size = planned_world_size(config, args.world_size)
    if NVIDIA_DRIVER.exists():
        from rlhfuse.run.launch import with_device  # torch, which takes seconds, is asked only where there may be a GPU

        config = with_device(config, planned=True)
    paths = {role: Path(getattr(config, role).path) for role in config.roles()}
    specs, folder = read_specs(config), Path(config.actor.tokenizer)
    tokenizer = load_tokenizer(folder, specs[Role.ACTOR]) if has_tokenizer(folder) else None
    specs, notes = resolve_tokens(config, paths, specs, tokenizer, required=False)
    asked = config
    if asked.data.max_prompt_tokens == AUTO:
        from rlhfuse.run.preflight import resolve_lengths  # torch, once more

        config = resolve_lengths(config, specs)
    lengths = load_lengths(args.lengths, default_prompt=config.data.max_prompt_tokens).lengths if args.lengths else None
    if args.lengths:
        config = config.with_(parallel={"lengths": args.lengths})  # a search is for the same
    layouts = resolve_layouts(config, specs, world_size)
    plan = make_plan(draft_plan(layouts.config, specs, world_size, lengths, asked))
    if args.problem:
        write_json(args.problem, plan.schedule.problem.to_dict())
    for note in filter(None, (*layouts.lines, *notes, idle_settings(asked))):
        print(note, file=sys.stderr)
    print(json.dumps(plan.report.to_dict(), indent=1) if args.json else plan.report.render())
    return 0


def run() -> None:
    """The installed program."""
    run_program(main)


if __name__ == "__main__":
    run()
