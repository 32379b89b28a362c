"""Whole iterations of the run's own trainer on one rank, with what of them is the same again left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rehearsal.stand_ins.others import Batch, OtherRanks
from rehearsal.stand_ins.paused import DrawnPauses
from rehearsal.stand_ins.samples import Samples

from rlhfuse.base.sample_ids import sample_id
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.data.prompts import Prompt
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.run.sampling.function_reward import FunctionRewarder
from rlhfuse.run.sampling.tool_caller import ToolCaller
from rlhfuse.run.trainer import Trainer
from rlhfuse.tasks.packing import split_samples
from rlhfuse.tasks.role import POLICY

MINIBATCHES = 2
TAIL_SHARE = 5  # of all samples one in so many is unfinished at the trigger, where the plan has no R_t yet


class RehearsedTrainer(Trainer):
    """Decodes the last tokens of samples that begin as prompts, and trains two mini-batches of full micro-batches.

    With inter-stage fusion the rank's instance is freed in even iterations, and receives samples in odd ones.
    """

    caller: Any  # DrawnPauses, or None without tools

    def prepare(self, samples: Samples) -> None:
        """Before the first iteration."""
        self.samples = samples
        self.others = OtherRanks(samples, self.models.place.placement, self.rank, self.engine)
        if not self.threshold.threshold and self.config.fusion.inter_stage:
            self.threshold.threshold = self.config.samples_per_iteration // TAIL_SHARE

    def _start_rewarder(self) -> FunctionRewarder | None:
        return None

    def _start_caller(self, folder: Path) -> ToolCaller | None:
        pauses: Any = DrawnPauses() if self.config.rollout.multi_turn.enable else None
        return pauses

    def _requests(self, iteration: int, prompts: Sequence[Prompt], first: int) -> list[Request]:
        copies = range(self.config.rollout.samples_per_prompt)
        ids = [sample_id(iteration, place, copy) for place in range(len(prompts)) for copy in copies]
        instances = split_samples(len(ids), len(self.models.place.placement.instances))
        threshold = self.threshold.threshold if len(instances) > 1 else 0
        tails = self._tails(iteration, [len(part) for part in instances], threshold)
        parts = [self.samples.requests([ids[i] for i in part], tail) for part, tail in zip(instances, tails)]
        self.others.begin(Batch(tuple(parts), tails, threshold, self.threshold.limits))
        return [request for part in parts for request in part]

    def _tails(self, iteration: int, sizes: Sequence[int], threshold: int) -> tuple[int, ...]:
        """Unfinished samples of each instance at the trigger."""
        if not threshold:
            return (0,) * len(sizes)
        share = max(2, threshold // len(sizes))
        other = share + 1 if iteration % 2 == 0 else share - 1
        return tuple(min(share if i == self.others.instance else other, size - 1) for i, size in enumerate(sizes))

    def _train(self, iteration: int, batch: RolloutBatch, algorithm: AlgorithmConfig) -> list[MinibatchResult]:
        full = self.samples.training_batch(MINIBATCHES, self.plan.batch)
        algorithm = algorithm.model_copy(update={"minibatches": MINIBATCHES, "epochs": 1})
        return super()._train(self.config.held_iterations(POLICY) + iteration, full, algorithm)
