"""The batch of an iteration: from prompts to micro-batches, and numbers for what the configuration leaves to it.

Mini-batches change what is computed: they follow from the batch, as long as every pipeline gets a sample of each.
Micro-batches change the order of sums alone, so it is they that fit themselves to the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import auto_layouts
from rlhfuse.config.settings import AlgorithmConfig, RolloutConfig, RunConfig
from rlhfuse.config.values import AUTO

MOST = 4  # of each
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
    actor_pipelines: int
    actor_microbatches: int  # per pipeline (M1)
    critic_pipelines: int  # 0 without a critic
    critic_microbatches: int  # per pipeline (M2)
    epochs: int = 1  # passes over the samples

    @staticmethod
    def of(
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        layouts: Mapping[str, ParallelLayout],
        actor_microbatches: int,
    ) -> BatchArithmetic:
        """The batch over layouts by task, generation's and those of training, that `LayoutRules` accept."""
        samples, instances = rollout.prompts_per_iteration * rollout.samples_per_prompt, layouts["generation"].dp
        actor, critic = layouts["actor_train"].dp, layouts["critic_train"].dp if "critic_train" in layouts else 0
        return BatchArithmetic(
            prompts=rollout.prompts_per_iteration,
            samples_per_prompt=rollout.samples_per_prompt,
            samples=samples,
            instances=instances,
            samples_per_instance=-(-samples // instances),
            minibatches=algorithm.minibatches,
            samples_per_minibatch=samples // algorithm.minibatches,
            actor_pipelines=actor,
            actor_microbatches=actor_microbatches,
            critic_pipelines=critic,
            critic_microbatches=actor * actor_microbatches // critic if critic else 0,
            epochs=algorithm.epochs,
        )

    @property
    def microbatches(self) -> int:
        """Micro-batches of one mini-batch over all pipelines; as many for both models."""
        return self.actor_pipelines * self.actor_microbatches

    @property
    def optimizer_steps(self) -> int:
        """Per iteration."""
        return self.minibatches * self.epochs

    @property
    def samples_per_microbatch(self) -> float:
        return self.samples_per_minibatch / self.microbatches

    @property
    def microbatches_of(self) -> dict[str, int]:
        """Micro-batches per pipeline of each model that trains."""
        critic = {"critic": self.critic_microbatches} if self.critic_pipelines else {}
        return {"actor": self.actor_microbatches, **critic}

    def lines(self) -> list[str]:
        """The equations as text for people."""
        lines = [
            f"{self.prompts} prompts x {self.samples_per_prompt} copies = {self.samples} samples per iteration",
            f"{self.samples} samples over {self.instances} generation instances: up to "
            f"{self.samples_per_instance} each",
            f"{self.samples} samples / {self.minibatches} mini-batches = {self.samples_per_minibatch} samples "
            "per optimizer step",
        ]
        pipelines = {"actor": self.actor_pipelines, "critic": self.critic_pipelines}
        for model, microbatches in self.microbatches_of.items():
            parts = f"({pipelines[model]} {model} pipelines x {microbatches} micro-batches)"
            each = f"{self.samples_per_microbatch:.4g} samples per micro-batch"
            lines.append(f"{self.samples_per_minibatch} samples / {parts} = {each}")
        steps = f"{self.minibatches} mini-batches x {self.epochs} epochs = {self.optimizer_steps} optimizer steps"
        return [*lines, steps] if self.epochs > 1 else lines


def resolve_batch(config: RunConfig) -> RunConfig:
    """`config` with both numbers. Given ones stay; what cannot be is for `LayoutRules` to refuse.

    Beside layouts that are auto, micro-batches stay so. Mini-batches do not, lest a search change what is computed.
    """
    samples = config.samples_per_iteration
    minibatches, microbatches = config.algorithm.minibatches, config.fusion.actor_microbatches
    actor, critic = (_pipelines(getattr(config.parallel, f"{role}_train")) for role in ("actor", "critic"))
    step = critic // math.gcd(actor, critic) if config.algorithm.has_critic else 1  # of M1, for K1*M1 = K2*M2
    if minibatches == AUTO:
        least = max(LEAST_SAMPLES, actor * step) if microbatches == AUTO else actor * microbatches
        counts = (count for count in range(MOST, 1, -1) if samples % count == 0 and samples // count >= least)
        minibatches = next(counts, 1)
    if microbatches == AUTO and not auto_layouts(config):
        most = min(MOST, samples // minibatches // actor)
        microbatches = max(step, most // step * step)
    return config.with_(algorithm={"minibatches": minibatches}, fusion={"actor_microbatches": microbatches})


def _pipelines(layout: str) -> int:
    return 1 if layout == AUTO else ParallelLayout.parse(layout).dp
