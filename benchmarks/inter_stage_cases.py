"""What the inter-stage benchmark generates and scores: models, output lengths of a real trace, thresholds.

Two instances of one rank each. Critic and reward model have `scorer_layers` / `layers` times the actor's layers, the
reference is of the actor's shape. Knows nothing of processes or of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import CostModel, largest_flat_batch
from rlhfuse.errors import InputError
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths, load_lengths

INSTANCES = 2
ROLES = ("actor", "reference", "critic", "reward")
SCORERS = ROLES[1:]
HEAD_DIM = 64
BLOCK_TOKENS = 16
ELEMENT_BYTES = 4  # float32
PROFILED_TOKENS = 512  # the most context of one decode step of the profile
PERCENTS = (0, 5, 10, 20, 30, 40, 50, 60, 80, 95)  # of the batch: the R_t that are swept
QUICK_PERCENTS = (0, 20, 60)
TRACE = Path(__file__).resolve().parents[1] / "../shared/data/traces/arxiv_llama2tok.csv"


@dataclass(frozen=True)
class Sizes:
    """Models, batch and packs of one run of the benchmark."""

    name: str  # layers of the actor : layers of critic and reward
    layers: int
    scorer_layers: int
    hidden: int
    mlp: int
    vocab: int
    samples: int
    max_prompt: int
    max_output: int
    score_tokens: int  # of one pack

    def spec(self, role: str) -> ModelSpec:
        heads = self.hidden // HEAD_DIM
        layers = self.layers if role in ("actor", "reference") else self.scorer_layers
        return ModelSpec(
            "llama",
            layers,
            self.hidden,
            heads,
            heads,
            HEAD_DIM,
            self.mlp,
            self.vocab,
            context=self.max_prompt + self.max_output,
        )

    def parameters(self, role: str) -> int:
        spec = self.spec(role)
        return spec.layers * spec.layer_parameters + 2 * spec.embedding_parameters

    @property
    def blocks(self) -> int:
        """KV blocks of an instance: a quarter of all samples at their longest (few get there), and the profile's."""
        quarter = self.samples * -(-(self.max_prompt + self.max_output) // BLOCK_TOKENS) // 4
        return max(quarter, PROFILED_TOKENS // BLOCK_TOKENS + 2 * self.samples)

    @property
    def kv_bytes_per_token(self) -> float:
        return self.spec("actor").kv_bytes_per_token(ELEMENT_BYTES)

    def limits(self, costs: CostModel, lengths: SampleLengths) -> InstanceLimits:
        """BS_max from the costs at the batch's median context, as a training run finds it."""
        median = float(np.median(np.asarray(lengths.prompt) + np.asarray(lengths.output) / 2))
        return InstanceLimits(
            max_sequences=self.samples,
            kv_capacity_bytes=self.blocks * BLOCK_TOKENS * self.kv_bytes_per_token,
            kv_bytes_per_token=self.kv_bytes_per_token,
            block_tokens=BLOCK_TOKENS,
            bs_max=largest_flat_batch(costs, median, self.samples),
            max_prompt_tokens=self.max_prompt,
            max_output_tokens=self.max_output,
            score_tokens=self.score_tokens,
        )


FULL = (
    Sizes("1:2", 6, 12, 640, 1728, 1024, 64, 32, 384, 512),
    Sizes("2:1", 6, 3, 640, 1728, 1024, 64, 32, 384, 512),
)
QUICK = (
    Sizes("1:2", 2, 4, 256, 704, 512, 12, 16, 64, 128),
    Sizes("2:1", 2, 1, 256, 704, 512, 12, 16, 64, 128),
)


def batch_lengths(source: str | Path, sizes: Sizes, seed: int) -> SampleLengths:
    """Requests drawn from a trace, prompts and outputs each scaled so that the batch's longest is the longest allowed.

    Raises InputError for a trace that is not there or has no lengths of prompts.
    """
    trace = load_lengths(source)
    if trace.prompt_column is None:
        raise InputError(f"{source} has no column of prompt lengths; give a trace that has both")
    (drawn,) = trace.lengths.draw(sizes.samples, 1, seed)
    return SampleLengths(scaled(drawn.prompt, sizes.max_prompt), scaled(drawn.output, sizes.max_output))


def scaled(values: Sequence[int], longest: int) -> tuple[int, ...]:
    """The longest value becomes `longest`, none less than 1."""
    return tuple(max(1, math.ceil(value * longest / max(values))) for value in values)


def thresholds(samples: int, percents: Sequence[int]) -> tuple[int, ...]:
    """R_t in samples, ascending, each once."""
    return tuple(sorted({(samples * percent + 50) // 100 for percent in percents}))


def context_batches(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """(sequences, tokens of context of each) of the decode steps that are profiled, PROFILED_TOKENS in all or fewer.

    Short contexts are those of the first steps, long ones those of the tail, which a few sequences reach.
    """
    short, longest = sizes.max_prompt, sizes.max_output // 2
    batches = [1 << power for power in range(sizes.samples.bit_length()) if 1 << power <= sizes.samples]
    return tuple(dict.fromkeys((b, min(c, max(1, PROFILED_TOKENS // b))) for b in batches for c in (short, longest)))


def packs(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """(sequences, tokens of each) of the packs that are profiled, up to the budget."""
    each = 2 * sizes.max_prompt
    return ((1, each), (1, sizes.max_output // 2), (4, each), (sizes.score_tokens // each, each))
