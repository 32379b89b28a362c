"""The settings of the RLHFuse paper on this project's simulator, beside the ranges that the paper reports.

    python benchmarks/paper_settings.py [--draws 5] [--variants P,K]

Variants are assumptions that the paper leaves open: P pads each sample to 1024 + the maximum length in inference and
training, K packs, K.3 packs and pays 0.3 s for every task that scores. Training is serial 1F1B against the lower bound.
The tensor degree is 8, but 4 for 33B, whose 52 heads 8 does not divide: twice the instances, of half the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from harness import Figure, Measurement, counting, named, options

from rlhfuse.base.errors import run_program
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.collectives import ring_all_reduce_seconds
from rlhfuse.costs.cost_model import MicrobatchTokens
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.job_cost import JobCost
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.problem import fused_problem
from rlhfuse.schedule.rules.builders import serial_makespan
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.iteration import BatchSimulation
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, sweep_threshold

PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))
MAX_LENGTHS = (512, 1024, 2048)
VARIANTS = ("P", "K", "K.3")
RANGES = {"gen_infer": (1.2, 1.6), "training": (1.2, 1.3), "iteration": (1.2, 1.4)}  # paper 7.1, 7.2: over Base
SAMPLES, MINIBATCHES, GPUS = 512, 8, 256
MAX_PROMPT, BS_MAX, SCORE_TOKENS, ELEMENT_BYTES = 1024, 16, 8192, 2
KV_BYTES = 37.5e9  # of each device of an instance
TASK_SECONDS = 0.3  # of variant K.3
TICK_SECONDS = 1e-6


@dataclass(frozen=True)
class Cell:
    """Predicted seconds of one pair, maximum length and variant."""

    pair: str
    max_length: int
    variant: str
    threshold: Threshold  # the sweep, with seconds of generation and inference
    training: tuple[float, float]  # serial, fused
    tail_seconds: float  # of generation, after 99% of the samples have ended; mean over the draws

    @property
    def speedups(self) -> dict[str, float]:
        found, (serial, fused) = self.threshold, self.training
        whole = (found.serial_seconds + serial) / (found.fused_seconds + fused)
        return {"gen_infer": found.serial_seconds / found.fused_seconds, "training": serial / fused, "iteration": whole}


class JobCostWithTasks(JobCost):
    """Getting ready to score takes longer."""

    def swap_in_seconds(self) -> float:
        return super().swap_in_seconds() + TASK_SECONDS * len(self.scorers)


@cache
def model(name: str) -> tuple[ModelSpec, int, int]:
    """A LLaMA of the paper's size, its largest tensor degree within a machine, and its pipeline stages in training."""
    layers, hidden, heads, mlp, tp, stages = {
        "13B": (40, 5120, 40, 13824, 8, 4),
        "33B": (60, 6656, 52, 17920, 4, 8),
        "65B": (80, 8192, 64, 22016, 8, 16),
    }[name]
    return ModelSpec("llama", layers, hidden, heads, heads, hidden // heads, mlp, 32000, 8192), tp, stages


def cost_of(name: str, scalar_head: bool, layout: ParallelLayout) -> AnalyticCost:
    spec = model(name)[0]
    spec.check_layout(layout, name)
    return AnalyticCost(spec, layout, hardware_by_name("h800"), ELEMENT_BYTES, scalar_head)


def draw_lengths(max_length: int, draws: int, seed: int = 0) -> tuple[SampleLengths, ...]:
    """Batches of lognormal lengths."""
    generator = np.random.default_rng(seed)

    def some(median: float, sigma: float, most: int) -> tuple[int, ...]:
        return tuple(np.clip(np.exp(generator.normal(np.log(median), sigma, SAMPLES)), 1, most).astype(int).tolist())

    batches = [(some(100, 1.0, max_length), some(150, 0.8, MAX_PROMPT)) for _ in range(draws)]
    return tuple(SampleLengths(prompt, output) for output, prompt in batches)


def job_of(pair: tuple[str, str], max_length: int, variant: str) -> tuple[int, JobCost, InstanceLimits]:
    """Instances, as many as the actor's tensor degree makes, their costs and limits; scorers are no wider."""
    actor, critic = pair
    spec, tp, _ = model(actor)
    layout, scoring = ParallelLayout(1, tp, 1), ParallelLayout(1, min(tp, model(critic)[1]), 1)
    scorers = (cost_of(actor, False, layout), cost_of(critic, True, scoring), cost_of(critic, True, scoring))
    job = JobCostWithTasks if variant == "K.3" else JobCost
    costs = job(cost_of(actor, False, layout), scorers, cross_node=True)
    limits = InstanceLimits(
        max_sequences=256,
        kv_capacity_bytes=tp * KV_BYTES,
        kv_bytes_per_token=spec.kv_bytes_per_token(ELEMENT_BYTES),
        block_tokens=16,
        bs_max=BS_MAX,
        max_prompt_tokens=MAX_PROMPT,
        max_output_tokens=max_length,
        score_tokens=SCORE_TOKENS,
        padded_score_tokens=MAX_PROMPT + max_length if variant == "P" else 0,
    )
    return GPUS // tp, costs, limits


def sweep(pair: tuple[str, str], max_length: int, variant: str, batches: tuple[SampleLengths, ...]) -> Threshold:
    """R_t = 0, 5%, ..., 95%."""
    return sweep_threshold(batches, *job_of(pair, max_length, variant))


def training_seconds(pair: tuple[str, str], tokens: float) -> tuple[float, float]:
    """An iteration's training, serial and fused, with one sample of `tokens` tokens in a micro-batch."""
    layouts = {}
    for role, name in zip(("actor", "critic"), pair):
        _, tp, stages = model(name)
        layouts[role] = ParallelLayout(GPUS // tp // stages, tp, stages)
    costs = {role: cost_of(name, role == "critic", layouts[role]) for role, name in zip(layouts, pair)}
    microbatches = SAMPLES // MINIBATCHES // layouts["actor"].dp
    stage_costs = {
        role: cost.stage_costs(MicrobatchTokens(tokens, 1, tokens), TICK_SECONDS) for role, cost in costs.items()
    }
    problem = fused_problem(layouts, microbatches, stage_costs)
    link = hardware_by_name("h800").cross_link_bandwidth
    reduction = sum(
        ring_all_reduce_seconds(cost.memory.weights_bytes(), cost.layout.dp, link) for cost in costs.values()
    )
    parts = serial_makespan(problem), latency_bound(problem)
    serial, fused = (MINIBATCHES * (float(ticks) * TICK_SECONDS + reduction) for ticks in parts)
    return serial, fused


def predict(pair: tuple[str, str], max_length: int, variant: str, draws: int) -> Cell:
    batches = draw_lengths(max_length, draws)
    tokens = float(MAX_PROMPT + max_length)
    if variant != "P":
        tokens = sum(sum(b.prompt) + sum(b.output) for b in batches) / (SAMPLES * draws)
    found = sweep(pair, max_length, variant, batches)
    simulated = [BatchSimulation(batch, *job_of(pair, max_length, variant)) for batch in batches]
    tails = [one.moment(0) - one.moment(SAMPLES // 100) for one in simulated]
    training = training_seconds(pair, tokens)
    return Cell("/".join(pair), max_length, variant, found, training, float(np.mean(tails)))


def within(cells: Sequence[Cell], what: str) -> int:
    """How many cells lie in the paper's range, to the digit that it prints."""
    low, high = RANGES[what]
    return sum(low <= round(cell.speedups[what], 1) <= high for cell in cells)


def facts_of(cell: Cell) -> dict[str, Any]:
    """What pictures need of it."""
    found = cell.threshold
    return {
        "pair": cell.pair,
        "max_length": cell.max_length,
        "variant": cell.variant,
        "generation_seconds": found.sweep[0].generation_seconds,
        "tail_seconds": cell.tail_seconds,
        "serial_seconds": found.serial_seconds,
        "fused_seconds": found.fused_seconds,
        "training_seconds": cell.training,
        "best_ratio": found.ratio,
        "migration_seconds": max(point.migration_seconds for point in found.sweep),
        "sweep": {f"{point.ratio:.2f}": point.fused_seconds for point in found.sweep}
        if cell.max_length == 1024
        else {},
    }


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--draws", type=counting, default=5, help="batches of lengths drawn and averaged")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of P,K,K.3")
    arguments = parser.parse_args()
    variants = named("--variants", arguments.variants, {name: name for name in VARIANTS})
    variants = variants[:1] if arguments.quick else variants
    measurement = Measurement("paper_settings", arguments, timed=False)
    draws = 1 if arguments.quick else arguments.draws
    which = [(pair, length, variant) for variant in variants for length in MAX_LENGTHS for pair in PAIRS]
    cells = [predict(*one, draws) for one in (which[:2] if arguments.quick else which)]
    rows = []
    for cell in cells:
        found, gains = cell.threshold, [f"{gain:.2f}" for gain in cell.speedups.values()]
        loss = next(point.fused_seconds for point in found.sweep if point.ratio == 0.2) / found.fused_seconds - 1
        seconds = (found.sweep[0].generation_seconds, found.serial_seconds, found.fused_seconds)
        cells_of_row = [*(f"{value:.2f}" for value in seconds), f"{found.ratio:.0%}", f"{loss:.1%}", *gains]
        rows.append([cell.variant, str(cell.max_length), cell.pair, *cells_of_row])
    title = "Predicted; paper: Gen+Inf 1.2-1.6, Train 1.2-1.3, end to end 1.2-1.4"
    head = ("variant", "max", "actor/critic", "gen s", "gen+inf s", "fused s", "best R_t", "20% loses")
    measurement.table("settings", title, (*head, "Gen+Inf", "Train", "end to end"), rows)
    for variant in variants:
        own = [cell for cell in cells if cell.variant == variant]
        for what in RANGES:
            gains = Figure.of([cell.speedups[what] for cell in own], "x")
            measurement.figure(f"{variant.lower()}.{what}", gains)
            measurement.figure(f"{variant.lower()}.{what}.within", within(own, what), f"of {len(own)}")
        founds = [cell.threshold for cell in own]
        shares = Figure.of([found.serial_seconds / found.sweep[0].generation_seconds - 1 for found in founds])
        measurement.figure(f"{variant.lower()}.inference_over_generation", shares)
    measurement.facts(ranges=RANGES, draws=draws, cells=[facts_of(cell) for cell in cells])
    measurement.finish()


if __name__ == "__main__":
    run_program(main)
