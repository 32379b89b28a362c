"""The settings of the RLHFuse paper on this project's simulator, beside the ranges that the paper reports.

    python benchmarks/paper_settings.py [--draws 5] [--markdown]

Four model pairs (actor/critic; the reference has the actor's size, the reward model the critic's), maximum lengths 512,
1024 and 2048, 512 samples on 256 GPUs: 32 generation instances of tp 8, training in tp 8 with 4, 8 and 16 stages
for 13B, 33B and 65B. H800-like GPUs at assumed efficiencies (costs/hardware.py). Lengths are lognormal, since the
paper's are not published: outputs of median 100 and sigma 1, prompts of median 150 and sigma 0.8. The paper does
not say whether inference and training ran on padded batches, nor what a task costs beside its arithmetic:

    P     padded: each sample costs 1024 + the maximum length in inference and training
    K     packed: each sample costs its own tokens
    K.3   packed, and an instance pays 0.3 s for every task that scores, once in an iteration

Generation and inference: serial against the best R_t of the sweep. Training: serial 1F1B against the schedule's lower
bound, gradients not overlapped. The bound is reached by search on the rows of Table 3 that these plans are
(16 and 32 micro-batches of 33B/13B and 65B/33B: benchmarks/schedule_table.py). Tables go to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
from rich.console import Console
from rich.table import Table

from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost, CostModel, JobCost
from rlhfuse.costs.collectives import ring_all_reduce_seconds
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.errors import InputError, run_program
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.problem import fused_problem
from rlhfuse.schedule.rules.builders import serial_makespan
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, sweep_threshold

PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))
MAX_LENGTHS = (512, 1024, 2048)
VARIANTS = ("P", "K", "K.3")
RANGES = {"gen_infer": (1.2, 1.6), "training": (1.2, 1.3), "iteration": (1.2, 1.4)}  # paper 7.1, 7.2: over Base
SAMPLES, MINIBATCHES, INSTANCES, TP, GPUS = 512, 8, 32, 8, 256
MAX_PROMPT, BS_MAX, KV_BYTES, SCORE_TOKENS, ELEMENT_BYTES = 1024, 16, 300e9, 8192, 2
TASK_SECONDS = 0.3  # of variant K.3
TICK_SECONDS = 1e-6


@dataclass(frozen=True)
class Cell:
    """Predicted seconds of one pair, maximum length and variant."""

    pair: str
    max_length: int
    variant: str
    generation_seconds: float
    serial_seconds: float  # generation and inference
    fused_seconds: float
    best_ratio: float
    ratio_20_loss: float  # seconds at R_t = 20% over the best, less 1
    training_serial_seconds: float
    training_fused_seconds: float

    @property
    def speedups(self) -> dict[str, float]:
        return {
            "gen_infer": self.serial_seconds / self.fused_seconds,
            "training": self.training_serial_seconds / self.training_fused_seconds,
            "iteration": (self.serial_seconds + self.training_serial_seconds)
            / (self.fused_seconds + self.training_fused_seconds),
        }


@dataclass(frozen=True)
class WithTaskCost:
    """A CostModel in which getting ready to score takes longer."""

    base: CostModel
    seconds: float

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        return self.base.prefill_seconds(tokens, sequences)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self.base.decode_step_seconds(batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        return self.base.score_seconds(tokens, sequences)

    def swap_in_seconds(self) -> float:
        return self.base.swap_in_seconds() + self.seconds

    def migration_seconds(self, kv_bytes: float) -> float:
        return self.base.migration_seconds(kv_bytes)

    def meeting_seconds(self) -> float:
        return self.base.meeting_seconds()

    def release_seconds(self) -> float:
        return self.base.release_seconds()

    def beside(self, neighbour: str) -> WithTaskCost:
        return self


@cache
def model(name: str) -> tuple[ModelSpec, int]:
    """A LLaMA of the paper's size and its pipeline stages in training."""
    layers, hidden, heads, mlp, stages = {
        "13B": (40, 5120, 40, 13824, 4),
        "33B": (60, 6656, 52, 17920, 8),
        "65B": (80, 8192, 64, 22016, 16),
    }[name]
    return ModelSpec("llama", layers, hidden, heads, heads, hidden // heads, mlp, 32000, 8192), stages


def cost_of(name: str, scalar_head: bool, layout: ParallelLayout) -> AnalyticCost:
    return AnalyticCost(model(name)[0], layout, hardware_by_name("h800"), ELEMENT_BYTES, scalar_head)


def draw_lengths(max_length: int, draws: int, seed: int = 0) -> tuple[SampleLengths, ...]:
    """Batches of lognormal lengths."""
    generator = np.random.default_rng(seed)

    def some(median: float, sigma: float, most: int) -> tuple[int, ...]:
        return tuple(np.clip(np.exp(generator.normal(np.log(median), sigma, SAMPLES)), 1, most).astype(int).tolist())

    batches = [(some(100, 1.0, max_length), some(150, 0.8, MAX_PROMPT)) for _ in range(draws)]
    return tuple(SampleLengths(prompt, output) for output, prompt in batches)


def sweep(pair: tuple[str, str], max_length: int, variant: str, batches: tuple[SampleLengths, ...]) -> Threshold:
    """R_t = 0, 5%, ..., 95% on 32 instances."""
    actor, critic = pair
    layout = ParallelLayout(1, TP, 1)
    scorers = (cost_of(actor, False, layout), cost_of(critic, True, layout), cost_of(critic, True, layout))
    costs: CostModel = JobCost(cost_of(actor, False, layout), scorers, cross_node=True)
    if variant == "K.3":
        costs = WithTaskCost(costs, TASK_SECONDS * len(scorers))
    limits = InstanceLimits(
        max_sequences=256,
        kv_capacity_bytes=KV_BYTES,
        kv_bytes_per_token=model(actor)[0].kv_bytes_per_token(ELEMENT_BYTES),
        block_tokens=16,
        bs_max=BS_MAX,
        max_prompt_tokens=MAX_PROMPT,
        max_output_tokens=max_length,
        score_tokens=SCORE_TOKENS,
        padded_score_tokens=MAX_PROMPT + max_length if variant == "P" else 0,
    )
    return sweep_threshold(batches, INSTANCES, costs, limits)


def training_seconds(pair: tuple[str, str], tokens: float) -> tuple[float, float]:
    """An iteration's training, serial and fused, with one sample of `tokens` tokens in a micro-batch."""
    layouts = {}
    for role, name in zip(("actor", "critic"), pair):
        stages = model(name)[1]
        layouts[role] = ParallelLayout(GPUS // TP // stages, TP, stages)
    costs = {role: cost_of(name, role == "critic", layouts[role]) for role, name in zip(layouts, pair)}
    microbatches = SAMPLES // MINIBATCHES // layouts["actor"].dp
    stage_costs = {role: cost.stage_costs(tokens, 1, TICK_SECONDS) for role, cost in costs.items()}
    problem = fused_problem(layouts, microbatches, stage_costs)
    link = hardware_by_name("h800").cross_link_bandwidth
    reduction = sum(ring_all_reduce_seconds(cost.weights_bytes(), cost.layout.dp, link) for cost in costs.values())
    parts = serial_makespan(problem), latency_bound(problem)
    serial, fused = (MINIBATCHES * (float(ticks) * TICK_SECONDS + reduction) for ticks in parts)
    return serial, fused


def predict(pair: tuple[str, str], max_length: int, variant: str, draws: int) -> Cell:
    batches = draw_lengths(max_length, draws)
    found = sweep(pair, max_length, variant, batches)
    tokens = float(MAX_PROMPT + max_length)
    if variant != "P":
        tokens = sum(sum(b.prompt) + sum(b.output) for b in batches) / (SAMPLES * draws)
    at_20 = next(point.fused_seconds for point in found.sweep if point.ratio == 0.2)
    return Cell(
        "/".join(pair),
        max_length,
        variant,
        found.sweep[0].generation_seconds,
        found.serial_seconds,
        found.fused_seconds,
        found.ratio,
        at_20 / found.fused_seconds - 1,
        *training_seconds(pair, tokens),
    )


def within(cells: list[Cell], what: str) -> int:
    """How many cells lie in the paper's range, to the two digits that it prints."""
    low, high = RANGES[what]
    return sum(low <= round(cell.speedups[what], 1) <= high for cell in cells)


def conclusions(cells: list[Cell]) -> list[str]:
    """In words, what the ranges need."""
    lines = []
    for variant in VARIANTS:
        own = [cell for cell in cells if cell.variant == variant]
        if not own:
            continue
        found = ", ".join(
            f"{what} {min(c.speedups[what] for c in own):.2f}-{max(c.speedups[what] for c in own):.2f} "
            f"(paper {low}-{high}, {within(own, what)} of {len(own)} within)"
            for what, (low, high) in RANGES.items()
        )
        share = [cell.serial_seconds / cell.generation_seconds - 1 for cell in own]
        lines.append(f"{variant}: inference is {min(share):.2f}-{max(share):.2f} of generation; {found}")
    lines.append(
        "Fusing generation and inference cannot gain more than the share of inference: the paper's 1.2-1.6 need "
        "inference of 0.2-0.6 of generation, which padding or a fixed cost per task gives and packed batches "
        "at these efficiencies do not. The training range needs long micro-batches or overlapped gradients."
    )
    return lines


def table(cells: list[Cell]) -> Table:
    heads = "variant, max, actor/critic, gen s, gen+inf s, fused s, best R_t, 20% loses, Gen+Inf, Train, end to end"
    made = Table(title="Predicted; paper: Gen+Inf 1.2-1.6, Train 1.2-1.3, end to end 1.2-1.4")
    for head in heads.split(", "):
        made.add_column(head, justify="right")
    for cell in cells:
        gains = [f"{value:.2f}" for value in cell.speedups.values()]
        made.add_row(
            cell.variant,
            str(cell.max_length),
            cell.pair,
            f"{cell.generation_seconds:.2f}",
            f"{cell.serial_seconds:.2f}",
            f"{cell.fused_seconds:.2f}",
            f"{cell.best_ratio:.2f}",
            f"{cell.ratio_20_loss:.1%}",
            *gains,
        )
    return made


def markdown(cells: list[Cell]) -> str:
    rows = ["| variant | max | actor/critic | gen s | gen+inf s | fused s | best R_t | Gen+Inf | Train | end to end |"]
    rows.append("|" + "---|" * 10)
    for cell in cells:
        gains = " | ".join(f"{value:.2f}" for value in cell.speedups.values())
        rows.append(
            f"| {cell.variant} | {cell.max_length} | {cell.pair} | {cell.generation_seconds:.2f} | "
            f"{cell.serial_seconds:.2f} | {cell.fused_seconds:.2f} | {cell.best_ratio:.0%} | {gains} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The paper's settings on the simulator, beside the paper's ranges.")
    parser.add_argument("--draws", type=int, default=5, help="batches of lengths drawn and averaged")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of P,K,K.3")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown on stderr")
    args = parser.parse_args()
    chosen = args.variants.split(",")
    if args.draws < 1 or not set(chosen) <= set(VARIANTS):
        raise InputError(f"--draws {args.draws} must be at least 1 and --variants {args.variants} some of P,K,K.3")
    which = [(pair, length, variant) for variant in chosen for length in MAX_LENGTHS for pair in PAIRS]
    cells = [predict(*one, args.draws) for one in which]
    screen = Console(stderr=True)
    screen.print(markdown(cells) if args.markdown else table(cells))
    for line in conclusions(cells):
        screen.print(line)
    print(json.dumps({"ranges": RANGES, "cells": [{**asdict(cell), "speedups": cell.speedups} for cell in cells]}))


if __name__ == "__main__":
    run_program(main)
