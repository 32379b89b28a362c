"""One mini-batch through actor and critic: the cut, the program, one optimizer step each.

The mini-batch is cut into K x M micro-batches once, the same for both models, computed identically on every
rank; pipeline k of a model takes parts k*M to (k+1)*M. Losses are sums divided by the mini-batch's response
tokens, a number known to every rank beforehand, so that data-parallel reduction is a sum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.config import AlgorithmConfig
from rlhfuse.fusion.intra_stage import ActionSpan, PipelineWork, ProgramExecutor
from rlhfuse.fusion.p2p import Channels
from rlhfuse.models.heads import token_logprobs
from rlhfuse.models.stage import LossFunction, PackedTokens, TrainingStage
from rlhfuse.parallel.groups import ModelGrid
from rlhfuse.parallel.optimizer import ModelOptimizer, StepResult
from rlhfuse.ppo.balance import cut_microbatches
from rlhfuse.ppo.losses import Stats, add_stats, policy_loss_sum, value_loss_sum
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.schedule.lowering import Program
from rlhfuse.schedule.ranks import FusedRanks
from rlhfuse.spec import ModelSpec


@dataclass(frozen=True)
class TrainedModel:
    """One model that trains on this rank."""

    role: str  # "actor" or "critic"
    spec: ModelSpec
    grid: ModelGrid
    stage: TrainingStage
    optimizer: ModelOptimizer
    tp_group: dist.ProcessGroup
    dtype: torch.dtype


@dataclass(frozen=True)
class MinibatchResult:
    """What one mini-batch did on this rank. Statistics are this rank's sums, on last stages only."""

    stats: Mapping[str, Stats]  # role -> sums
    tokens: int  # response tokens of the whole mini-batch
    parts_tokens: tuple[int, ...]  # tokens of every micro-batch
    steps: Mapping[str, StepResult]
    spans: tuple[ActionSpan, ...]
    program_seconds: float


class PairStep:
    """Trains actor and critic on this rank by its program."""

    def __init__(
        self, rank: int, ranks: FusedRanks, program: Program, models: Mapping[str, TrainedModel], channels: Channels,
        algorithm: AlgorithmConfig, temperature: float, device: torch.device, progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._rank = rank
        self._ranks = ranks
        self._program = program
        self._models = models
        self._channels = channels
        self._algorithm = algorithm
        self._temperature = temperature
        self._device = device
        self._progress = progress

    def run(self, batch: RolloutBatch, microbatches: Mapping[str, int], lr: Mapping[str, float]) -> MinibatchResult:
        """Train on one mini-batch; `microbatches` per pipeline and `lr` are by role.

        Raises FloatingPointError naming the model when a gradient is not finite; weights are untouched then.
        """
        parts = cut_microbatches(batch.lengths.tolist(), self._models["actor"].grid.dp * microbatches["actor"])
        stats: dict[str, Stats] = {}
        pipelines = {
            self._ranks.pipeline_of(role, self._rank): self._work(model, batch, parts, microbatches[role], stats)
            for role, model in self._models.items()
        }
        for model in self._models.values():
            model.optimizer.zero_grad()
        start = time.perf_counter()
        spans = ProgramExecutor(self._program, pipelines, self._channels, self._progress).run()
        seconds = time.perf_counter() - start
        steps = {}
        for role, model in self._models.items():
            self._progress(f"training: optimizer step of the {role}")
            model.optimizer.finish_gradients()
            steps[role] = model.optimizer.step(lr[role])
            if not steps[role].finite:
                raise FloatingPointError(f"the {role}'s gradient is not finite; its weights were not updated")
        lengths = batch.lengths.tolist()
        tokens = tuple(sum(lengths[i] for i in part) for part in parts)
        return MinibatchResult(stats, batch.response_tokens, tokens, steps, tuple(spans), seconds)

    def _work(
        self, model: TrainedModel, batch: RolloutBatch, parts: list[list[int]], count: int, stats: dict[str, Stats]
    ) -> PipelineWork:
        pipeline, _, tp_rank = model.grid.position(self._rank)
        cuts = [batch.select(part).to(self._device) for part in parts[pipeline * count : (pipeline + 1) * count]]
        packed = []
        for cut in cuts:
            tokens, borders = cut.tokens.tolist(), cut.cu_seqlens.tolist()
            rows = [tokens[a:b] for a, b in zip(borders, borders[1:])]
            packed.append(PackedTokens.pack(rows, self._device, model.stage.stage.shards))
        losses = {"actor": self._actor_loss, "critic": self._critic_loss}
        loss = losses[model.role](model, cuts, batch.response_tokens, stats, counts=tp_rank == 0)
        return PipelineWork(model.stage, tuple(packed), loss, model.spec.hidden, model.dtype)

    def _actor_loss(
        self, model: TrainedModel, cuts: list[RolloutBatch], tokens: int, stats: dict[str, Stats], counts: bool
    ) -> LossFunction:
        algorithm = self._algorithm

        def loss(logits_TV: Tensor, microbatch: int) -> Tensor:
            cut = cuts[microbatch]
            logprobs, entropy = token_logprobs(
                logits_TV[cut.prediction_index], cut.tokens[cut.response_index], model.spec.vocab,
                self._temperature, model.tp_group,
            )  # fmt: skip
            total, sums = policy_loss_sum(logprobs, cut.old_logprobs, cut.advantages, algorithm.clip_eps)
            if counts:
                sums["entropy"] = entropy.detach().double().sum()
                stats["actor"] = add_stats(stats.get("actor", {}), sums)
            if algorithm.entropy_coef:
                total = total - algorithm.entropy_coef * entropy.sum()
            return total / tokens

        return loss

    def _critic_loss(
        self, model: TrainedModel, cuts: list[RolloutBatch], tokens: int, stats: dict[str, Stats], counts: bool
    ) -> LossFunction:
        algorithm = self._algorithm

        def loss(values_T: Tensor, microbatch: int) -> Tensor:
            cut = cuts[microbatch]
            values = values_T[cut.prediction_index]
            total, sums = value_loss_sum(values, cut.values, cut.returns, algorithm.value_clip_eps)
            if counts:
                stats["critic"] = add_stats(stats.get("critic", {}), sums)
            return algorithm.value_loss_coef * total / tokens

        return loss
