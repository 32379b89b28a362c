"""The batch of an iteration: from prompts to micro-batches, and numbers for what the configuration leaves to it.

Mini-batches change what is computed: they follow from the batch, as long as every pipeline gets a sample of each.
Micro-batches change the order of sums alone: how a mini-batch is cut into them follows the layouts (microbatch_cut.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.settings import FusionConfig, RolloutConfig, RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.tasks.microbatch_cut import MicrobatchCut
from rlhfuse.tasks.role import POLICY
from rlhfuse.tasks.task import TASKS, TRAINED

MOST = 4  # mini-batches
LEAST_SAMPLES = 4  # of a mini-batch: an optimizer step on fewer follows single samples


@dataclass(frozen=True)
class BatchArithmetic:
    """From prompts to micro-batches; every count names what it counts."""

    prompts: int
    samples_per_prompt: int
    samples: int
    instances: int
    samples_per_instance: int  # of the fullest
    minibatches: int
    samples_per_minibatch: int
    pipelines: Mapping[str, int] = field(hash=False)  # of each model that trains, the policy first
    cut: MicrobatchCut
    by_tokens: bool
    epochs: int = 1  # passes over the samples

    @staticmethod
    def of(
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        fusion: FusionConfig,
        layouts: Mapping[str, ParallelLayout],
        longest: int,
    ) -> BatchArithmetic:
        """The batch over layouts by task, generation's and those of training, that `LayoutRules` accept.

        `longest`: tokens of a sample, at most. Raises InputError where no micro-batches of so many tokens are possible.
        """
        samples, instances = rollout.prompts_per_iteration * rollout.samples_per_prompt, layouts["generation"].dp
        trained = {TASKS[name].role: layouts[name] for name in TRAINED if name in layouts}
        first = trained[POLICY]
        sizes = first.dp, samples // algorithm.minibatches, longest
        if fusion.actor_microbatches != AUTO:
            cut = MicrobatchCut.by_samples(fusion.actor_microbatches, *sizes)
        else:
            # as many as fill every model's pipelines once
            least = max(-(-layout.dp * layout.pp // first.dp) for layout in trained.values())
            how = multiple_of([*trained.values()], fusion.by_rule), least
            cut = MicrobatchCut.by_tokens(int(fusion.microbatch_tokens), *sizes, *how)
        return BatchArithmetic(
            prompts=rollout.prompts_per_iteration,
            samples_per_prompt=rollout.samples_per_prompt,
            samples=samples,
            instances=instances,
            samples_per_instance=-(-samples // instances),
            minibatches=algorithm.minibatches,
            samples_per_minibatch=samples // algorithm.minibatches,
            pipelines={role: layout.dp for role, layout in trained.items()},
            cut=cut,
            by_tokens=fusion.actor_microbatches == AUTO,
            epochs=algorithm.epochs,
        )

    @property
    def most_microbatches(self) -> int:
        """As many as a mini-batch may have over all pipelines; the same for all models."""
        return self.pipelines[POLICY] * self.cut.rungs[-1]

    @property
    def optimizer_steps(self) -> int:
        """Per iteration."""
        return self.minibatches * self.epochs

    def microbatches_of(self, rung: int) -> dict[str, int]:
        """Micro-batches per pipeline of each model that trains, where the policy's have `rung`."""
        return {role: self.pipelines[POLICY] * rung // count for role, count in self.pipelines.items()}

    def lines(self) -> list[str]:
        """The equations as text for people."""
        lines = [
            f"{self.prompts} prompts x {self.samples_per_prompt} copies = {self.samples} samples per iteration",
            f"{self.samples} samples over {self.instances} generation instances: up to "
            f"{self.samples_per_instance} each",
            f"{self.samples} samples / {self.minibatches} mini-batches = {self.samples_per_minibatch} samples "
            "per optimizer step",
        ]
        for model, pipelines in self.pipelines.items():
            counts = [str(self.microbatches_of(rung)[model]) for rung in self.cut.rungs]
            parts = f"{self.samples_per_minibatch} samples / ({pipelines} {model} pipelines x"
            if self.by_tokens:
                most = f"at most {self.cut.tokens:,.0f} tokens"
                lines.append(f"{parts} {' or '.join(counts)} micro-batches), the first with {most} each")
            else:
                each = self.samples_per_minibatch / self.most_microbatches
                lines.append(f"{parts} {counts[0]} micro-batches) = {each:.4g} samples per micro-batch")
        steps = f"{self.minibatches} mini-batches x {self.epochs} epochs = {self.optimizer_steps} optimizer steps"
        return [*lines, steps] if self.epochs > 1 else lines


def multiple_of(layouts: Sequence[ParallelLayout], by_rule: bool) -> int:
    """What M1 must be a multiple of, so that K1*M1 = K2*M2; `by_rule`: in an order that takes virtual stages in turn,
    for which the micro-batches of each pipeline divide over its stages."""
    turns = by_rule and all(layout.chunks > 1 for layout in layouts)
    parts = [layout.dp * (layout.pp if turns else 1) for layout in layouts]
    return math.lcm(*(part // math.gcd(layouts[0].dp, part) for part in parts))


def resolve_batch(config: RunConfig) -> RunConfig:
    """`config` with its number of mini-batches. A given one stays; what cannot be is for `LayoutRules` to refuse."""
    samples = config.samples_per_iteration
    minibatches, microbatches = config.algorithm.minibatches, config.fusion.actor_microbatches
    if minibatches != AUTO:
        return config
    texts = (getattr(config.parallel, f"{role}_train") for role in config.trained())
    layouts = [ParallelLayout.parse("d1t1p1" if text == AUTO else text) for text in texts]
    first, step = layouts[0].dp, multiple_of(layouts, by_rule=False)
    least = max(LEAST_SAMPLES, first * step) if microbatches == AUTO else first * microbatches
    counts = (count for count in range(MOST, 1, -1) if samples % count == 0 and samples // count >= least)
    return config.with_(algorithm={"minibatches": next(counts, 1)})
