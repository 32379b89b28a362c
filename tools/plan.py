"""Print the plan of a run; nothing is launched.

    python tools/plan.py --config run.yaml [key=value ...] [--world-size N] [--json] [--what-if] [--problem FILE]

Layouts, batch arithmetic, memory per rank and phase, predicted times, the training schedule, R_t, and why.
--what-if adds what other placements would take, which no run can execute yet: models on parts of the ranks, the critic
beside the next generation; each with the layouts that are best for it, whatever those of the config are.
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

from rich.console import Console

from rlhfuse.base.errors import run_program
from rlhfuse.base.files import write_json
from rlhfuse.config.load import load_config
from rlhfuse.config.role import Role
from rlhfuse.config.rules import idle_settings
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.models.tokenizer import has_tokenizer, load_tokenizer, resolve_tokens
from rlhfuse.planning.draft import PlanDraft, draft_plan, read_specs
from rlhfuse.planning.meshes.placements import Placement, placements
from rlhfuse.planning.meshes.run_problem import RunProblem
from rlhfuse.planning.meshes.tell import as_dict, as_text
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
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also list placements that no run can execute yet, with their best layouts and predicted seconds",
    )
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
    draft = draft_plan(layouts.config, specs, world_size, lengths, asked)
    plan = make_plan(draft)
    if args.problem:
        write_json(args.problem, plan.schedule.problem.to_dict())
    for note in filter(None, (*layouts.lines, *notes, idle_settings(asked))):
        print(note, file=sys.stderr)
    found = _placements(draft) if args.what_if else ()
    today = plan.report.seconds.fused - plan.report.seconds.capture  # placements record no graphs either
    if args.json:
        others = {"what_if": as_dict(found, today)} if args.what_if else {}
        print(json.dumps({**plan.report.to_dict(), **others}, indent=1))
    else:
        print("\n".join([plan.report.render(), *([as_text(found, today)] if args.what_if else [])]))
    return 0


def _placements(draft: PlanDraft) -> tuple[Placement, ...]:
    """While they are priced a terminal sees which."""
    with Console(stderr=True).status("what if") as status:
        run = RunProblem.of_draft(draft, lambda task: status.update(f"what if: pricing {task}"))
        return placements(run, lambda name: status.update(f"what if: {name}"))


def run() -> None:
    """The installed program."""
    run_program(main)


if __name__ == "__main__":
    run()
