"""Numbers for algorithm.minibatches and fusion.actor_microbatches where they are `auto`.

Mini-batches change what is computed: they follow from the batch, as long as every pipeline gets a sample of each.
Micro-batches change the order of sums alone, so it is they that fit themselves to the layout.
"""

from __future__ import annotations

import math

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import auto_layouts
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO

MOST = 4  # of each
LEAST_SAMPLES = 4  # of a mini-batch: an optimizer step on fewer follows single samples


def resolve_batch(config: RunConfig) -> RunConfig:
    """`config` with both numbers. Given ones stay; what cannot be is for `layouts.check_layouts` to refuse.

    Beside layouts that are auto, micro-batches stay so. Mini-batches do not, lest a search change what is computed.
    """
    samples = config.samples_per_iteration
    minibatches, microbatches = config.algorithm.minibatches, config.fusion.actor_microbatches
    actor, critic = (_pipelines(getattr(config.parallel, f"{role}_train")) for role in ("actor", "critic"))
    step = critic // math.gcd(actor, critic) if config.algorithm.has_critic else 1  # of M1, for K1*M1 = K2*M2
    if minibatches == AUTO:
        least = max(LEAST_SAMPLES, actor * step) if microbatches == AUTO else actor * microbatches
        cuts = (count for count in range(MOST, 1, -1) if samples % count == 0 and samples // count >= least)
        minibatches = next(cuts, 1)
    if microbatches == AUTO and not auto_layouts(config):
        most = min(MOST, samples // minibatches // actor)
        microbatches = max(step, most // step * step)
    return config.with_(algorithm={"minibatches": minibatches}, fusion={"actor_microbatches": microbatches})


def _pipelines(layout: str) -> int:
    return 1 if layout == AUTO else ParallelLayout.parse(layout).dp
