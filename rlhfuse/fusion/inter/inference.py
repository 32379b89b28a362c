"""Scoring of finished samples by the frozen models: reference log-probabilities, values and a reward.

Samples are packed up to a token budget; the result for a sample does not depend on the pack it was in (CPU,
float32). Weights come in from host memory for the first pack, each model while the one before it scores, and go
out afterwards. A job may have any of the three models, or none where a function gives the rewards (`Rewarder`).
Knows nothing of who generated a sample or of when it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rlhfuse.fusion.inter.weight_loader import WeightLoader
from rlhfuse.models.heads import token_logprobs
from rlhfuse.models.stage import PackedTokens, PipelineStage
from rlhfuse.parallel.offload import OffloadedWeights
from rlhfuse.ppo.rollout import Rollout, RolloutBatch


@dataclass(frozen=True)
class FrozenModel:
    """One model as inference uses it: its single stage, its offloaded weights and its tensor-parallel group."""

    stage: PipelineStage
    offloaded: OffloadedWeights
    tp_group: dist.ProcessGroup


@dataclass(frozen=True)
class PackWork:
    """What one pack was; `seconds` without waiting for weights."""

    tokens: int
    samples: int
    seconds: float


class Rewarder(Protocol):
    """Scores samples outside the models, beside generation and inference.

    Each instance's leader has one. What it says stays apart from a rollout's `score`, the reward model's: the gather
    at the end brings all of it to every rank as `GenInferReport.function_scores`, sample id -> score.
    """

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Take finished samples; returns at once."""

    def finish(self) -> dict[int, float]:
        """Sample id -> score of everything submitted since the last call; waits. Raises RewardError."""


class Scorer:
    """Reference, critic and reward model of one inference replica, those of them that the run has."""

    def __init__(
        self,
        reference: FrozenModel | None,
        critic: FrozenModel | None,
        reward: FrozenModel | None,
        *,
        vocab: int,
        temperature: float,
        device: torch.device,
    ) -> None:
        self._reference, self._critic, self._reward = reference, critic, reward
        self._models = [model for model in (reference, critic, reward) if model is not None]
        self._vocab = vocab
        self._temperature = temperature
        self._device = device
        self._loader: WeightLoader | None = None
        self._waited = 0.0  # seconds of the running pack for weights

    @property
    def load_seconds(self) -> float:
        """What bringing in the models took so far, without gaps between them."""
        return self._loader.seconds if self._loader else 0.0

    def begin_load(self) -> None:
        """Start to bring the models in, one after the other; returns at once. A pack waits for each in turn."""
        if self._loader is None:
            self._loader = WeightLoader([model.offloaded for model in self._models], self._device)

    def wait_for_first(self) -> None:
        """Until scoring can begin: the first model is there."""
        self.begin_load()
        if self._models:
            self._wait(self._models[0])

    def release(self) -> None:
        """Give the models' device memory back, whether they were loaded or not."""
        if self._loader is not None:
            self._loader.close()
        self._loader = None
        for model in self._models:
            model.offloaded.release()

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], PackWork]:
        """Each rollout with ref_logprobs, values and score, as far as there are models; one pack.

        Loads the models if nobody has begun to.
        """
        self.begin_load()
        start, self._waited = time.perf_counter(), 0.0
        ordered = sorted(rollouts, key=lambda r: r.sample_id)
        batch = RolloutBatch.from_rollouts(ordered)
        packed = PackedTokens.pack([r.prompt_tokens + r.response_tokens for r in ordered], self._device)
        predict = batch.prediction_index.to(self._device)
        responses = batch.response_lengths.tolist()
        nothing = [None] * len(ordered)
        ref, values, scores = nothing, nothing, nothing
        if self._reference is not None:
            targets = batch.tokens[batch.response_index].to(self._device)
            logits = self._outputs(self._reference, packed)[predict]
            logprobs, _ = token_logprobs(logits, targets, self._vocab, self._temperature, self._reference.tp_group)
            ref = logprobs.cpu().split(responses)
        if self._critic is not None:
            values = self._outputs(self._critic, packed)[predict].float().cpu().split(responses)
        if self._reward is not None:
            last = (batch.cu_seqlens[1:].long() - 1).to(self._device)
            scores = self._outputs(self._reward, packed)[last].float().cpu().tolist()
        out = [r.with_scores(*given) for r, *given in zip(ordered, ref, values, scores)]
        return out, PackWork(len(batch.tokens), len(ordered), time.perf_counter() - start - self._waited)

    def _outputs(self, model: FrozenModel, packed: PackedTokens) -> torch.Tensor:
        self._wait(model)
        return model.stage.forward(packed, None)

    def _wait(self, model: FrozenModel) -> None:
        start = time.perf_counter()
        self._loader.wait(next(i for i, one in enumerate(self._models) if one is model))
        self._waited += time.perf_counter() - start
