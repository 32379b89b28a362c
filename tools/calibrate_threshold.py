"""Choose the migration threshold R_t from a file of lengths, and write threshold.json.

    python tools/calibrate_threshold.py --config run.yaml --lengths FILE[:COLUMN] --out threshold.json

The file is csv, jsonl or parquet with one request a line, or the metrics.jsonl of a past run. Batches of the run's
size are drawn from it and R_t = 0, 5%, ..., 95% of a batch are simulated on the run's generation instances.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rlhfuse.config import RunConfig, load_config
from rlhfuse.errors import InputError, run_program
from rlhfuse.simulator.cost import CostModel
from rlhfuse.simulator.hardware import hardware_by_name
from rlhfuse.simulator.lengths import LengthsFile, SampleLengths, load_lengths
from rlhfuse.simulator.planner import generation_cost, instance_limits, median_context, read_specs
from rlhfuse.simulator.profile import load_run_costs
from rlhfuse.simulator.threshold import Threshold, save_threshold, sweep_threshold
from rlhfuse.spec import ParallelLayout


def main() -> int:
    args = _parse()
    if Path(args.out).exists() and not args.force:
        raise InputError(f"--out {args.out} exists; give another name or --force to replace it")
    config = load_config(args.config, args.overrides)
    file = load_lengths(args.lengths, args.prompt_column, default_prompt=config.data.max_prompt_tokens)
    lengths = file.lengths.clip(config.data.max_prompt_tokens, config.rollout.max_response_tokens)
    instances = args.instances if args.instances is not None else ParallelLayout.parse(config.parallel.generation).dp
    threshold = _calibrate(config, args, lengths, instances)
    if args.plot:
        _plot(threshold, args.plot)
    save_threshold(threshold, args.out)
    for line in (*_describe(file, lengths, config), threshold.table(), threshold.explain(), f"written: {args.out}"):
        print(line)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Choose R_t from a file of lengths and write threshold.json.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--lengths", required=True, metavar="FILE[:COLUMN]", help="column: of the output lengths")
    parser.add_argument("--prompt-column", help="column of prompt lengths; default: a known name, or none")
    parser.add_argument("--out", required=True, help="threshold.json to write")
    parser.add_argument("--instances", type=int, help="generation instances; default dp of parallel.generation")
    parser.add_argument("--hardware", help="cpu, a100, h100, h800 or h200; default trainer.hardware")
    parser.add_argument("--cost", metavar="JSON", help="costs.json of a run, or a profile, instead of analytic costs")
    parser.add_argument("--draws", type=int, default=5, help="batches drawn and averaged")
    parser.add_argument("--plot", metavar="PNG", help="draw the curve")
    parser.add_argument("--force", action="store_true", help="replace an existing --out")
    return parser.parse_intermixed_args()


def _calibrate(config: RunConfig, args: argparse.Namespace, lengths: SampleLengths, instances: int) -> Threshold:
    if instances < 1 or args.draws < 1:
        raise InputError(f"--instances {instances} and --draws {args.draws} must be at least 1")
    specs = read_specs(config)
    costs: CostModel
    if args.cost:
        costs = load_run_costs(config, specs, args.cost)
    else:
        hardware = hardware_by_name(args.hardware or config.trainer.hardware, config.trainer.device)
        costs = generation_cost(config, specs, instances, hardware)
    limits = instance_limits(config, specs["actor"], instances, costs, median_context(lengths))
    batches = lengths.draw(config.samples_per_iteration, args.draws, config.trainer.seed)
    return sweep_threshold(batches, instances, costs, limits, clipped=lengths.clipped)


def _describe(file: LengthsFile, lengths: SampleLengths, config: RunConfig) -> tuple[str, ...]:
    prompts = f"prompts from {file.prompt_column!r}"
    if file.prompt_column is None:
        prompts = f"no prompt column: every prompt counts {config.data.max_prompt_tokens} tokens"
    whole, cut = file.lengths.percentiles(), lengths.percentiles()
    return (
        f"{len(lengths)} lengths from {file.path}, column {file.output_column!r}; {prompts}",
        f"in the file: output p50 {whole['p50']}, p99.9 {whole['p999']}, max {whole['max']} "
        f"(p99.9/p50 = {whole['p999'] / whole['p50']:.1f})",
        f"in this run: output p50 {cut['p50']}, p99.9 {cut['p999']}, max {cut['max']}; {lengths.clipped} outputs and "
        f"{lengths.clipped_prompts} prompts clipped to the run's maximum",
    )


def _plot(threshold: Threshold, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    ratios = [point.ratio for point in threshold.sweep]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(ratios, [point.fused_seconds for point in threshold.sweep], "o-", label="generation and inference, fused")
    axes.plot(ratios, [point.generation_seconds for point in threshold.sweep], "s--", label="generation alone")
    axes.axhline(threshold.serial_seconds, color="grey", linestyle=":", label="serial")
    axes.axvline(threshold.ratio, color="grey", linewidth=0.8)
    axes.set(xlabel="R_t / batch", ylabel="seconds", ylim=(0, None), title=f"R_t = {threshold.threshold}")
    axes.legend()
    beside = f"{path}.tmp"
    figure.savefig(beside, format=(Path(path).suffix or ".png")[1:])
    os.replace(beside, path)


if __name__ == "__main__":
    run_program(main)
