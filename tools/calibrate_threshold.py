"""Choose the migration threshold R_t by simulation, and write threshold.json.

    python tools/calibrate_threshold.py --config run.yaml --lengths FILE[:COLUMN] --out threshold.json
    python tools/calibrate_threshold.py --config run.yaml --lengths RUN_DIR --cost RUN_DIR/costs.json --out t.json
    python tools/calibrate_threshold.py --config run.yaml --trial 64 --out threshold.json --plot curve.png

Lengths come from a csv, jsonl or parquet file with one request a line, from the metrics of a past run, or from a
generation trial: so many prompts of the run's data through the engine in this process, which also shows what its
prefill and decode steps cost. Batches of the run's size are drawn from the lengths; R_t = 0, 5%, ..., 95% of a batch
are simulated on the generation instances of the run's plan, with the cache that memory leaves them; layouts that are
auto are searched first, as the run would.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here

from program import run_program

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_bytes, write_json
from rlhfuse.base.json_values import to_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import searched_keys
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.costs.machine import Host
from rlhfuse.costs.speculation import fit_steps
from rlhfuse.costs.table import CostTable
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.planning.candidate import Candidate, draft_plan
from rlhfuse.planning.job import Job
from rlhfuse.planning.settle import settle
from rlhfuse.simulator.lengths import SampleLengths, load_lengths
from rlhfuse.simulator.simulation import priced_limits
from rlhfuse.simulator.threshold import Threshold, sweep_threshold

if TYPE_CHECKING:
    from generation_trial import GenerationTrial

MOST_DRAWS = 1000  # the mean of as many batches is known to 3 % of what one batch scatters


def main() -> int:
    args = _parse()
    config = load_config(args.config, args.overrides)
    config = config.with_(trainer={"hardware": args.hardware or config.trainer.hardware})
    _check(args)
    run, trial = settle(_job(config, args)), None
    if args.trial is None:
        seen, source = _read_lengths(run.config, args)
    else:
        draft_plan(run)  # what cannot run is refused before the trial
        seen, trial, source = _trial(run.config, args.trial)
    draft = draft_plan(run, seen)
    lengths = draft.inputs.lengths.samples
    threshold = _calibrate(draft, _trial_costs(draft, trial, source) if trial else draft.costs, args.draws)
    if args.plot:
        _plot(threshold, args.plot)
    write_json(args.out, to_json(threshold))
    for line in (
        *run.lines,
        *source,
        *_describe(seen, lengths),
        _table(threshold),
        threshold.explain(),
        f"written: {args.out}",
    ):
        print(line)
    return 0


def _table(threshold: Threshold) -> str:
    """The curve as text, one R_t a line; the chosen one is marked."""
    lines = ["ratio  R_t  m  fused_s  generation_s  migration_s"]
    for point in threshold.sweep:
        mark = " <" if point.threshold == threshold.threshold else ""
        lines.append(
            f"{point.ratio:5.2f} {point.threshold:4d} {point.destinations:2d} {point.fused_seconds:8.4g} "
            f"{point.generation_seconds:13.4g} {point.migration_seconds:12.3g}{mark}"
        )
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Choose R_t by simulation and write threshold.json.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    lengths = parser.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", metavar="FILE[:COLUMN]", help="column of output lengths; or a run's folder")
    lengths.add_argument("--trial", type=int, metavar="PROMPTS", help="generate for so many prompts here")
    parser.add_argument("--prompt-column", help="column of prompt lengths; default: a known name, or none")
    parser.add_argument("--out", required=True, help="threshold.json to write")
    parser.add_argument("--world-size", type=int, help="ranks; default WORLD_SIZE, or the product of actor_train")
    parser.add_argument("--hardware", help="as trainer.hardware, which is the default")
    parser.add_argument("--cost", metavar="JSON", help="costs.json of a run or a profile, instead of analytic costs")
    parser.add_argument("--draws", type=int, default=5, help="batches drawn and averaged")
    parser.add_argument("--plot", metavar="PNG", help="draw the curve of the paper's Figure 9")
    parser.add_argument("--force", action="store_true", help="replace an existing --out")
    return parser.parse_intermixed_args()


def _check(args: argparse.Namespace) -> None:
    """What can be refused before anything is read or run."""
    if Path(args.out).exists() and not args.force:
        raise InputError(f"--out {args.out} exists; give another name or --force to replace it")
    for name in ("world_size", "draws", "trial"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.draws > MOST_DRAWS:
        raise InputError(f"--draws {args.draws} must be at most {MOST_DRAWS}")
    for path in filter(None, (args.out, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise InputError(f"the folder of {path} does not exist")
    if args.plot and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"--plot {args.plot}: use a name that ends in .png, .pdf or .svg")


def _calibrated(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """`config` at these costs; layouts that are auto are those that a run of these lengths would choose."""
    lengths = args.lengths if args.lengths and searched_keys(config) else config.parallel.lengths
    costs = {"threshold_file": "", "profile": args.cost or config.fusion.profile}
    return config.with_(fusion=costs, parallel={"lengths": lengths})


def _job(config: RunConfig, args: argparse.Namespace) -> Job:
    specs, host, device, longest = read_specs(config), Host.here(), AUTO, None
    if args.trial is not None or config.data.max_prompt_tokens == AUTO:
        from rlhfuse.run import preflight  # torch loads for a trial, and to read prompts

        longest = preflight.longest_prompt(config, specs)
        if args.trial is not None:
            host, device = preflight.this_host(config.trainer), preflight.device_of(config.trainer)
    return Job(_calibrated(config, args), specs, planned_world_size(config, args.world_size), host, device, longest)


def _read_lengths(config: RunConfig, args: argparse.Namespace) -> tuple[SampleLengths, list[str]]:
    """Lengths of a file as they are, and a line that says where they are from."""
    file = load_lengths(args.lengths, args.prompt_column, default_prompt=config.data.max_prompt_tokens)
    prompts = f"prompts from {file.prompt_column!r}"
    if file.prompt_column is None:
        prompts = f"no prompt column: every prompt counts {config.data.max_prompt_tokens} tokens"
    return file.lengths, [f"{len(file.lengths)} lengths from {file.path}, column {file.output_column!r}; {prompts}"]


def _trial(config: RunConfig, prompts: int) -> tuple[SampleLengths, GenerationTrial, list[str]]:
    """Lengths that the engine makes here, its steps, and a line that says so."""
    from generation_trial import run_trial  # the one part that needs torch

    def progress(text: str) -> None:
        print(f"\rtrial: {text}", end="", file=sys.stderr, flush=True)

    trial = run_trial(config, prompts, progress)
    print(file=sys.stderr)
    prefills = sum(step.prefill_tokens > 0 for step in trial.steps)
    told = f"{prompts} prompts generated here: {prefills} prefill and {len(trial.steps) - prefills} decode steps"
    return trial.lengths, trial, [told]


def _trial_costs(draft: Candidate, trial: GenerationTrial, told: list[str]) -> CostTable:
    """The draft's costs, with the steps of the trial in them where an instance is one process; says which."""
    if ParallelLayout.parse(draft.config.parallel.generation).tp > 1:
        told.append("steps are priced as in a plan: the trial ran in one process, an instance of the run has several")
        return draft.costs
    prefills = sum(step.prefill_tokens > 0 for step in trial.steps)
    if not 0 < prefills < len(trial.steps):
        made = f"{prefills} prefill and {len(trial.steps) - prefills} decode steps"
        raise InputError(f"the trial made {made}; raise --trial")
    steps = fit_steps(trial.steps)
    step, per_sequence, per_token = steps.decode.constant, *steps.decode.slopes
    told.append(
        f"a decode step took {step * 1e6:.0f} us + {per_sequence * 1e6:.1f} us x sequences + "
        f"{per_token * 1e6:.3f} us x context tokens; scoring, loading and moving are priced as before"
    )
    return draft.costs.with_steps(steps)


def _calibrate(draft: Candidate, costs: CostTable, draws: int) -> Threshold:
    """R_t of the instances that the plan has, at these costs."""
    config, lengths = draft.config, draft.inputs.lengths.samples
    limits = priced_limits(config.fusion.bs_max, draft.generation.limits, costs, lengths)
    batches = lengths.draw(config.samples_per_iteration, draws, config.trainer.seed)
    return sweep_threshold(batches, draft.batch.instances, costs, limits, clipped=lengths.clipped)


def _describe(seen: SampleLengths, lengths: SampleLengths) -> tuple[str, ...]:
    given, here = seen.percentiles(), lengths.percentiles()
    return (
        f"as given: output p50 {given['p50']}, p99.9 {given['p999']}, max {given['max']} "
        f"(p99.9/p50 = {given['p999'] / given['p50']:.1f})",
        f"in this run: output p50 {here['p50']}, p99.9 {here['p999']}, max {here['max']}; {lengths.clipped} outputs "
        f"and {lengths.clipped_prompts} prompts clipped to the run's maximum",
    )


def _plot(threshold: Threshold, path: str) -> None:
    """Figure 9: seconds of generation and inference over R_t / batch."""
    from matplotlib.figure import Figure

    ratios = [point.ratio for point in threshold.sweep]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(ratios, [point.fused_seconds for point in threshold.sweep], "o-", label="generation and inference, fused")
    axes.plot(ratios, [point.generation_seconds for point in threshold.sweep], "s--", label="generation alone")
    axes.axhline(threshold.serial_seconds, color="grey", linestyle=":", label="serial")
    mark = f"R_t = {threshold.threshold}"
    axes.plot([threshold.ratio], [threshold.fused_seconds], "*", color="black", markersize=12, label=mark)
    axes.set(xlabel="R_t / batch", ylabel="seconds", ylim=(0, None), title=f"{mark} on {threshold.instances} instances")
    axes.legend()
    figure.savefig(picture := io.BytesIO(), format=Path(path).suffix[1:])
    write_bytes(path, picture.getvalue())


run = partial(run_program, main)  # the installed program

if __name__ == "__main__":
    run()
