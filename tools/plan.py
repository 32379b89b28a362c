"""Print the plan of a run; nothing is launched.

    python tools/plan.py --config run.yaml [key=value ...] [--world-size N] [--json] [--what-if] [--problem FILE]
    python tools/plan.py --config run.yaml --pace FILE
    python tools/plan.py --config run.yaml --search [--lengths runs/past] [--best best.yaml] [--json > search.json]

Layouts, batch arithmetic, memory per rank and phase, predicted times, the training schedule, R_t, and why.
--search ranks all layouts instead, as if layouts, micro-batches and recomputation were auto in the file; arguments
that give a row still hold. --what-if adds what other placements would take, which no run can execute yet: models on
parts of the ranks, the critic beside the next generation; each with the layouts that are best for it. --problem writes
the training schedule's problem for tools/search_schedule.py: ticks of a microsecond, bytes; --pace what its work costs,
for a small run that lasts as long (docs/howto/paced_runs.md). Exits with 2 and the equation that fails, or the memory
that is missing, where the config cannot run on so many ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here

from layout_search.enough_ranks import with_enough_ranks
from layout_search.search_answer import SearchAnswer, answer_of, draw_memory_curve, overrides
from paced_plan import paced_cost_of
from placements.placements import Placement, placements
from placements.placements_text import as_dict, as_text
from placements.run_problem import RunProblem
from placements.run_work import RunWork
from program import run_program
from rich.console import Console

from rlhfuse.base.cuda_environment import has_gpu
from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_bytes, write_json, write_text
from rlhfuse.config.load import dump_config, load_config, model_folder, read_specs
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.costs.hardware import machines_by_name
from rlhfuse.costs.machine import Host
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.models.tokenizer import has_tokenizer, load_tokenizer, resolve_tokens
from rlhfuse.planning.candidate import CandidateInputs, draft_plan
from rlhfuse.planning.job import Job
from rlhfuse.planning.memory.memory_budget import MemoryRefusal
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.search.search import TOP, Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.settle import settle, settle_but_layouts, with_table
from rlhfuse.tasks.role import POLICY

SEARCH_OPTIONS = ("top", "best", "draw")
SEARCHED = (
    "parallel=auto",
    "fusion.microbatch_tokens=auto",
    "fusion.actor_microbatches=auto",
    "trainer.recompute=auto",
)


class Asked(NamedTuple):
    """What is to be done."""

    arguments: argparse.Namespace
    job: Job
    notes: tuple[str, ...]


def main() -> int:
    asked = read(parse_arguments())
    return search(asked) if asked.arguments.search else show_plan(asked)


def read(args: argparse.Namespace) -> Asked:
    """Raises InputError for files that say what cannot be."""
    loaded = load_config(args.config, [*(SEARCHED if args.search else ()), *args.overrides])
    own = load_config(args.config, args.overrides) if args.search and args.world_size is None else loaded
    world_size = planned_world_size(own, args.world_size)
    loaded = loaded.with_(parallel={"lengths": args.lengths}) if args.lengths else loaded
    return Asked(args, *found_here(loaded, world_size))


def show_plan(asked: Asked) -> int:
    args, job, notes = asked
    try:
        run = settle(job)
        draft = draft_plan(run)
        plan = make_plan(draft)
    except MemoryRefusal as refusal:
        raise without_a_plan(args, settle_but_layouts(job), refusal) from None
    if args.problem:
        write_json(args.problem, plan.likeliest.problem.to_dict())
    if args.pace:
        write_json(args.pace, paced_cost_of(draft).to_dict())
    for note in (*plan.notes, *notes):
        print(note, file=sys.stderr)
    found = what_if(settle_but_layouts(job)) if args.what_if else ()
    report = PlanReport.of(plan)
    show(args, report, found, report.seconds.fused - report.seconds.capture)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Raises InputError for options that do not go together."""
    parser = argparse.ArgumentParser(description="Print the plan of a run; nothing is launched.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--world-size", type=int, help="ranks; default WORLD_SIZE, or the product of actor_train")
    parser.add_argument("--lengths", metavar="FILE[:COLUMN]", help="past lengths, for predictions and R_t")
    parser.add_argument("--json", action="store_true", help="print plan.json instead of text")
    parser.add_argument("--problem", metavar="FILE", help="also write the problem of one mini-batch's schedule here")
    parser.add_argument(
        "--pace", metavar="FILE", help="also write what its work costs, for trainer.pace of a small run"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also list placements that no run can execute yet, with their best layouts and predicted seconds",
    )
    parser.add_argument("--search", action="store_true", help="rank all layouts instead of printing one plan")
    parser.add_argument("--top", type=int, metavar="N", help=f"with --search: the N fastest tables [{TOP}]")
    parser.add_argument("--best", metavar="FILE", help="with --search: write the run with the fastest table here")
    parser.add_argument("--draw", metavar="FILE.png", help="with --search: draw memory against time")
    args = parser.parse_intermixed_args()
    refuse_together(args)
    return args


def refuse_together(args: argparse.Namespace) -> None:
    """Raise InputError for options that do not go together."""
    given = [f"--{name.replace('_', '-')}" for name in SEARCH_OPTIONS if getattr(args, name) is not None]
    if given and not args.search:
        raise InputError(f"{given[0]} is of a search; add --search")
    for option in ("problem", "pace"):
        if args.search and getattr(args, option):
            raise InputError(f"--{option} is of one plan, --search of many; leave one of them out")
    if args.top is not None and args.top < 1:
        raise InputError(f"--top {args.top} shows nothing; give 1 or more")


def found_here(config: RunConfig, world_size: int) -> tuple[Job, tuple[str, ...]]:
    """The job of a configuration on this machine, and notes on its models."""
    host, device = Host.here(), AUTO
    if has_gpu(os.environ):
        from rlhfuse.run import preflight  # torch, which takes seconds, is asked only where there may be a GPU

        host, device = preflight.this_host(config.trainer), preflight.device_of(config.trainer, planned=True)
    paths = {role: model_folder(getattr(config, role).path, f"{role}.path") for role in config.roles()}
    specs, folder = read_specs(config), model_folder(config.actor.tokenizer, "actor.tokenizer")
    tokenizer = load_tokenizer(folder, specs[POLICY]) if has_tokenizer(folder) else None
    specs, notes = resolve_tokens(config.rollout, paths, specs, tokenizer, required=False)
    longest = None
    if config.data.max_prompt_tokens == AUTO:
        from rlhfuse.run.preflight import longest_prompt  # torch, once more

        longest = longest_prompt(config, specs)
    return Job(config, specs, world_size, host, device, longest), notes


def search(asked: Asked) -> int:
    """Print what is found; the plan of the best table is another command's."""
    args, job, _ = asked
    run = settle_but_layouts(job)
    ranking = Ranking(Setting.of(run))
    try:
        answer = answer_of(ranking, ranking.fastest(args.top or TOP))
    except MemoryRefusal as refusal:
        raise without_a_plan(args, run, refusal) from None
    best = answer.fastest.best
    if args.best:
        whole = with_table(job.config, best.table)
        write_text(args.best, f"# {str(answer.fastest).splitlines()[0]}\n{dump_config(whole)}")
    if args.draw:
        write_bytes(args.draw, draw_memory_curve(answer.priced, answer.curve))
    found = what_if(run) if args.what_if else ()
    show(args, answer, found, best.seconds - best.price.capture)
    if args.json:
        return 0
    where = ["--config", args.best] if args.best else ["--config", args.config, *args.overrides, *overrides(best)]
    words = [*where, *(["--lengths", args.lengths] if args.lengths else []), "--world-size", str(job.world_size)]
    print(f"plan of the best: {shlex.join(['python', 'tools/plan.py', *words])}")
    print(f"CPU time: {time.process_time():.1f} s")
    return 0


def show(args: argparse.Namespace, told: PlanReport | SearchAnswer, found: Sequence[Placement], today: float) -> None:
    """Print a plan or a search, and placements beside `today`, its seconds without graphs: they record none either."""
    if args.json:
        others = {"what_if": as_dict(found, today)} if args.what_if else {}
        print(json.dumps({**told.to_dict(), **others}, indent=1))
    else:
        print("\n".join([told.render(), *([as_text(found, today)] if args.what_if else [])]))


def what_if(run: Job) -> tuple[Placement, ...]:
    """Placements of the run's tasks with their prices. Names on standard error the one that is being priced."""
    machines = machines_by_name(run.config.trainer.hardware, run.config.trainer.device, run.world_size)
    work = RunWork(run, CandidateInputs.of(run))
    console = Console(stderr=True)
    with console.status("what if") as status:
        show = status.update if console.is_terminal else console.print
        whole, roomy = (
            RunProblem.of(of, machines, lambda task: show(f"what if: pricing {task}"))
            for of in (work, work.with_all_memory)
        )
        return placements(whole, roomy, lambda name: show(f"what if: {name}"))


def without_a_plan(args: argparse.Namespace, run: Job, refusal: MemoryRefusal) -> MemoryRefusal:
    """With --what-if: prints placements of a run that has no room where all tasks are on all ranks. Returns why, which
    says too where a task has no room on any of them, or how many ranks have room."""
    refusal = MemoryRefusal(refusal.phase, refusal.missing_bytes, with_enough_ranks(str(refusal), run))
    if args.what_if:
        try:
            found = what_if(run)
        except InputError as error:
            return MemoryRefusal(refusal.phase, refusal.missing_bytes, f"{refusal}; anywhere else: {error}")
        shown = (
            json.dumps({"what_if": as_dict(found, None)}, indent=1) if args.json else as_text(found, None, str(refusal))
        )
        print(shown, flush=True)
    return refusal


run = partial(run_program, main)  # the installed program

if __name__ == "__main__":
    run()
