"""The directory of a run that is over, as its trainer would have left it, with times that follow known rules."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from run_report.program_times import makespan, program_times
from run_report.timeline import simulate_gen_infer

from rlhfuse.base.clock import Span
from rlhfuse.base.files import write_json
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.monitor.metrics import MetricsWriter
from rlhfuse.monitor.trace import save_trace
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.action import Action
from rlhfuse.simulator.lengths import SampleLengths
from testkit.four_ranks import drafted
from testkit.sim_helpers import linear_file, long_tail

RANKS, MINIBATCHES, SAMPLES, THRESHOLD = 4, 4, 64, 16
START, GATHER, BETWEEN = 0.01, 0.02, 0.05  # around generation with inference, and between the phases
RESHARD = 0.1
TRACED = 2  # iterations in trace.json
MODEL = dict(
    model_type="llama",
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_hidden_layers=8,
    intermediate_size=192,
    vocab_size=512,
    max_position_embeddings=512,
)


def write_config(file: Path, fusion: str, reward: str = "") -> Path:
    """A run on four ranks, and beside it its models' config.json alone."""
    model = file.parent / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    file.write_text(
        f"actor: {{path: {model}}}\nreward: {{path: {model}{reward}}}\n"
        "data: {train_files: [prompts.jsonl], max_prompt_tokens: 128}\n"
        f"parallel: {{actor_train: d1t1p4, critic_train: d2t1p2, generation: d4t1p1}}\nfusion: {{{fusion}}}\n"
    )
    return file


def write_run(folder: Path, iterations: int = 5, reward: float | None = None) -> Path:
    """Every phase takes what its rule says: the first iteration ten times as long for its moves.

    `reward`: seconds of a call of a reward function.
    """
    costs, function = costs_of(reward), ", function: rewards:slow, workers: 2" if reward else ""
    config = load_config(write_config(folder / "config.yaml", "intra_stage: false", function))
    run_plan = make_plan(drafted(config, read_specs(config), RANKS))
    plan = PlanReport.of(run_plan)
    write_json(folder / "plan.json", plan.to_dict())
    save_schedule(folder / "schedule.json", run_plan.likeliest)
    write_json(folder / "costs.json", costs.to_dict())
    rung = plan.schedule.likeliest.microbatches
    times = program_times(run_plan.programs[rung], run_plan.ranks, _action_seconds)
    spans, begin = [], 100.0
    with closing(MetricsWriter(folder / "metrics.jsonl")) as metrics:
        for number in range(iterations):
            row, timeline = _row(plan, number, costs)
            metrics.write(row)
            if number >= iterations - TRACED:
                spans += _spans(row, timeline, times, begin)
            begin += row["timing_s/step"]
    save_trace(spans, folder / "trace.json")
    return folder


def costs_of(reward: float | None = None) -> MeasuredCost:
    return linear_file(swap_in=0.02, score_token=2e-5, reward=reward)


def lengths_of(number: int) -> SampleLengths:
    return long_tail(SAMPLES, seed=number)


def _action_seconds(action: Action) -> float:
    return {"F": 0.01, "B": 0.02, "RG": 0.001, "ST": 0.005}[str(action.kind)]


def _row(plan: PlanReport, number: int, costs: MeasuredCost):
    lengths, before = lengths_of(number), lengths_of(max(0, number - 1))
    tokens = sum(lengths.prompt) + sum(lengths.output)
    limits = plan.generation.limits
    limits = replace(limits, bs_max=costs.table.largest_flat_batch(before.median_context, limits.max_sequences))
    timeline = simulate_gen_infer(lengths, RANKS, costs.table, limits, THRESHOLD)
    seconds = {
        "reshard": RESHARD * (10 if number == 0 else 1),
        "gen": timeline.generation_seconds,
        "infer": timeline.total_seconds - timeline.generation_seconds + START + GATHER,
        "adv": 1e-6 * tokens,
        "train": 2e-4 * tokens,
    }
    seconds["step"] = sum(seconds.values()) + BETWEEN
    row = {
        "iteration": number,
        "lengths/prompt": list(lengths.prompt),
        "lengths/output": list(lengths.output),
        "perf/total_num_tokens": tokens,
        "perf/samples_per_second": SAMPLES / seconds["step"],
        "critic/score/mean": 0.1 * number,
        "critic/score/std": 0.4,
        "fusion/threshold": THRESHOLD,
        "fusion/instances": RANKS,
        "fusion/destinations": len(timeline.plan.destinations) if timeline.plan else 0,
        "fusion/makespan_measured_seconds": seconds["train"],
        "fusion/gen_infer_seconds": seconds["gen"] + seconds["infer"],
        **{f"timing_s/{phase}": value for phase, value in seconds.items()},
    }
    return row, timeline


def _spans(row: dict, timeline, times, begin: float) -> list[Span]:
    def everywhere(kind: str, start: float) -> list[Span]:
        facts = {"iteration": row["iteration"]}
        return [Span(kind, kind, rank, start, start + row[f"timing_s/{kind}"], args=facts) for rank in range(RANKS)]

    spans = everywhere("reshard", begin)
    begin += row["timing_s/reshard"] + START
    for span in timeline.spans:
        if span.kind != "idle":
            kind = "load" if span.kind == "swap_in" else span.kind
            spans.append(Span(kind, kind, span.instance, begin + span.start, begin + span.end))
    begin += timeline.total_seconds + GATHER
    spans += everywhere("adv", begin)
    begin += row["timing_s/adv"]
    scale = row["timing_s/train"] / MINIBATCHES / makespan(times)
    for minibatch in range(MINIBATCHES):
        first = begin + minibatch * row["timing_s/train"] / MINIBATCHES
        for rank, timed in times.items():
            for action, start, end in timed:
                kind = f"{action.pipeline.partition('.')[0]} {action.kind}"
                spans.append(Span(str(action), kind, rank, first + scale * start, first + scale * end))
    return spans
