"""Prices of the paper's models on paced ranks, by rooflines of H800s; a rank stands for the 8 GPUs of a tensor degree.

33B has 52 heads, which 8 does not divide: taken as if it did, as Table 3 has its stages. `P` pads each sample to the
longest prompt and response in scoring and training, `K` packs.
"""

from __future__ import annotations

from paper.settings import ELEMENT_BYTES, GPUS, MAX_PROMPT, llama

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.fits import Line
from rlhfuse.costs.forms.collectives import ring_all_reduce_seconds
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.paced import PacedCost, TrainingPrice
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tools.paced_plan import generation_lines, training_price

TP, SCORE_TOKENS = 8, 8192
STAGES = {"13B": 4, "33B": 8, "65B": 16}
Pair = tuple[str, str]  # actor, critic


def paced_cost(pair: Pair, sequences: int, lengths: SampleLengths, max_output: int, pads: bool) -> PacedCost:
    """Prices of instances that decode so many sequences, and micro-batches of one sample of these lengths."""
    actor, critic = pair
    generation = cost(actor, False, ParallelLayout(1, TP, 1))
    scorer = cost(critic, True, ParallelLayout(1, TP, 1))
    job = analytic_table(generation, (generation, scorer, scorer), cross_node=True)
    prompt, context = sum(lengths.prompt) / len(lengths), lengths.median_context
    token_bytes = llama(actor).kv_bytes_per_token(ELEMENT_BYTES)
    lines = generation_lines(job, sequences, prompt, context, SCORE_TOKENS, token_bytes)
    tokens, padded = prompt + sum(lengths.output) / len(lengths), MAX_PROMPT + max_output
    training = {role: price_of(name, role == "critic", tokens) for role, name in zip(("actor", "critic"), pair)}
    if pads:
        each = [job.score_seconds(count * padded, count) for count in (1, 9)]
        sample = (each[1] - each[0]) / 8
        lines["score"] = Line(max(0.0, each[0] - sample), (0.0, sample))
        training = {role: _padded(price, padded) for role, price in training.items()}
    told = f"{actor}/{critic}, {'padded' if pads else 'packed'}, on H800s by rooflines"
    return PacedCost(models=told, token_bytes=token_bytes, training=training, **lines)


def cost(name: str, scalar_head: bool, layout: ParallelLayout) -> AnalyticCost:
    """The tensor degree need not divide the heads."""
    return AnalyticCost(llama(name), layout, hardware_by_name("h800"), ELEMENT_BYTES, scalar_head)


def price_of(name: str, scalar_head: bool, tokens: float) -> TrainingPrice:
    """Training over all GPUs; the step is the sum of gradients over replicas, a move what a rank of a whole copy
    receives over the network."""
    stages = STAGES[name]
    trained = cost(name, scalar_head, ParallelLayout(GPUS // TP // stages, TP, stages))
    cut = tuple(map(len, trained.layout.stage_layers(trained.spec.layers)))
    link = trained.hardware.cross_link_bandwidth
    step = ring_all_reduce_seconds(trained.memory.weights_bytes(), trained.layout.dp, link)
    move = cost(name, scalar_head, ParallelLayout(1, TP, 1)).memory.weights_bytes() / link
    return training_price(trained.stage_seconds, cut, MicrobatchTokens(tokens, 1, tokens), step, move)


def _padded(price: TrainingPrice, tokens: float) -> TrainingPrice:
    """Every micro-batch lasts as if it had so many tokens."""
    stages = tuple((Line(one(tokens), (0.0,)), Line(other(tokens), (0.0,))) for one, other in price.stages)
    return TrainingPrice(stages, price.step, price.move)
