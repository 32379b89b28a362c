"""The settings of the RLHFuse paper on this project's simulator.

Variants are assumptions that the paper leaves open: P pads each sample to 1024 + the maximum length in inference and
training, K packs, K.3 packs and pays 0.3 s for every task that scores. Training is serial 1F1B against the lower bound.
The tensor degree is 8, but 4 for 33B, whose 52 heads 8 does not divide: twice the instances, of half the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from paper.llamas import llama
from run_report.timeline import simulate_gen_infer

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.forms.collectives import ring_all_reduce_seconds
from rlhfuse.costs.forms.training import TICK_SECONDS, MicrobatchTokens
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.table import CostTable
from rlhfuse.decisions.instance_limits import InstanceLimits
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.problem import fused_problem
from rlhfuse.schedule.rules.builders import serial_makespan
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, sweep_threshold

PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))
DEGREES = {"13B": (8, 4), "33B": (4, 8), "65B": (8, 16)}  # the largest tp in a machine; pipeline stages in training
MAX_LENGTHS = (512, 1024, 2048)
VARIANTS = ("P", "K", "K.3")
RANGES = {"gen_infer": (1.2, 1.6), "training": (1.2, 1.3), "iteration": (1.2, 1.4)}  # paper 7.1, 7.2: over Base
SAMPLES, MINIBATCHES, GPUS = 512, 8, 256
MAX_PROMPT, BS_MAX, SCORE_TOKENS, ELEMENT_BYTES = 1024, 16, 8192, 2
KV_BYTES = 37.5e9  # of each device of an instance
TASK_SECONDS = 0.3  # of variant K.3

Pair = tuple[str, str]  # actor, critic


@dataclass(frozen=True)
class Cell:
    """Predicted seconds of one pair, maximum length and variant."""

    pair: str
    max_length: int
    variant: str
    generation_seconds: float
    tail_seconds: float  # of generation, after 99% of the samples have ended; mean over the draws
    serial_seconds: float  # of generation with inference
    fused_seconds: float
    training_seconds: Sequence[float]  # serial, fused
    best_ratio: float  # R_t over the batch
    migration_seconds: float  # the most
    sweep: Mapping[str, float]  # fused seconds by R_t over the batch, with two digits

    @property
    def speedups(self) -> dict[str, float]:
        """By the words of RANGES."""
        serial, fused = self.training_seconds
        return {
            "gen_infer": self.serial_seconds / self.fused_seconds,
            "training": serial / fused,
            "iteration": (self.serial_seconds + serial) / (self.fused_seconds + fused),
        }


def cost_of(name: str, scalar_head: bool, layout: ParallelLayout) -> AnalyticCost:
    spec = llama(name)
    spec.check_layout(layout, name)
    return AnalyticCost(spec, layout, hardware_by_name("h800"), ELEMENT_BYTES, scalar_head)


def draw_lengths(max_length: int, draws: int, seed: int = 0) -> tuple[SampleLengths, ...]:
    """Batches of lognormal lengths."""
    generator = np.random.default_rng(seed)

    def some(median: float, sigma: float, most: int) -> tuple[int, ...]:
        return tuple(np.clip(np.exp(generator.normal(np.log(median), sigma, SAMPLES)), 1, most).astype(int).tolist())

    batches = [(some(100, 1.0, max_length), some(150, 0.8, MAX_PROMPT)) for _ in range(draws)]
    return tuple(SampleLengths(prompt, output) for output, prompt in batches)


def job_of(pair: Pair, max_length: int, variant: str) -> tuple[int, CostTable, InstanceLimits]:
    """Instances, as many as the actor's tensor degree makes, their costs and limits; scorers are no wider."""
    actor, critic = pair
    tp = DEGREES[actor][0]
    layout, scoring = ParallelLayout(1, tp, 1), ParallelLayout(1, min(tp, DEGREES[critic][0]), 1)
    scorers = (cost_of(actor, False, layout), cost_of(critic, True, scoring), cost_of(critic, True, scoring))
    costs = analytic_table(cost_of(actor, False, layout), scorers, cross_node=True)
    if variant == "K.3":  # getting ready to score takes longer
        costs = replace(costs, swap_in=costs.swap_in + TASK_SECONDS * len(scorers))
    limits = InstanceLimits(
        max_sequences=256,
        kv_capacity_bytes=tp * KV_BYTES,
        kv_bytes_per_token=llama(actor).kv_bytes_per_token(ELEMENT_BYTES),
        block_tokens=16,
        bs_max=BS_MAX,
        max_prompt_tokens=MAX_PROMPT,
        max_output_tokens=max_length,
        score_tokens=SCORE_TOKENS,
        padded_score_tokens=MAX_PROMPT + max_length if variant == "P" else 0,
    )
    return GPUS // tp, costs, limits


def sweep(pair: Pair, max_length: int, variant: str, batches: tuple[SampleLengths, ...]) -> Threshold:
    """R_t = 0, 5%, ..., 95%."""
    return sweep_threshold(batches, *job_of(pair, max_length, variant))


def training_seconds(pair: Pair, tokens: float) -> tuple[float, float]:
    """An iteration's training, serial and fused, with one sample of `tokens` tokens in a micro-batch."""
    layouts = {}
    for role, name in zip(("actor", "critic"), pair):
        tp, stages = DEGREES[name]
        layouts[role] = ParallelLayout(GPUS // tp // stages, tp, stages)
    costs = {role: cost_of(name, role == "critic", layouts[role]) for role, name in zip(layouts, pair)}
    microbatches = SAMPLES // MINIBATCHES // layouts["actor"].dp
    microbatch = MicrobatchTokens(tokens, 1, tokens)
    stage_costs = {role: cost.stage_costs(microbatch) for role, cost in costs.items()}
    problem = fused_problem(layouts, microbatches, stage_costs)
    link = hardware_by_name("h800").cross_link_bandwidth
    reduction = sum(
        ring_all_reduce_seconds(cost.memory.weights_bytes(), cost.layout.dp, link) for cost in costs.values()
    )
    parts = serial_makespan(problem), latency_bound(problem)
    serial, fused = (MINIBATCHES * (float(ticks) * TICK_SECONDS + reduction) for ticks in parts)
    return serial, fused


def predict(pair: Pair, max_length: int, variant: str, draws: int) -> Cell:
    batches = draw_lengths(max_length, draws)
    tokens = float(MAX_PROMPT + max_length)
    if variant != "P":
        tokens = sum(sum(b.prompt) + sum(b.output) for b in batches) / (SAMPLES * draws)
    found = sweep(pair, max_length, variant, batches)
    lines = [simulate_gen_infer(batch, *job_of(pair, max_length, variant), threshold=0) for batch in batches]
    ends = [sorted(line.sample_seconds) for line in lines]
    tails = [seconds[-1] - seconds[-1 - SAMPLES // 100] for seconds in ends]
    return Cell(
        pair="/".join(pair),
        max_length=max_length,
        variant=variant,
        generation_seconds=found.sweep[0].generation_seconds,
        tail_seconds=float(np.mean(tails)),
        serial_seconds=found.serial_seconds,
        fused_seconds=found.fused_seconds,
        training_seconds=training_seconds(pair, tokens),
        best_ratio=found.ratio,
        migration_seconds=max(point.migration_seconds for point in found.sweep),
        sweep={f"{point.ratio:.2f}": point.fused_seconds for point in found.sweep},
    )
