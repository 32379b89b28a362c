"""Scoring of finished samples by the frozen models: reference log-probabilities, values and a reward.

Samples are packed up to a token budget; the result for a sample does not depend on the pack it was in (CPU,
float32). Weights come in from host memory before the first pack and go out afterwards. Knows nothing of who
generated a sample or of when it is asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol, Sequence

import torch
import torch.distributed as dist

from rlhfuse.models.heads import token_logprobs
from rlhfuse.models.stage import PackedTokens, PipelineStage
from rlhfuse.parallel.offload import ParkedWeights
from rlhfuse.ppo.rollout import Rollout, RolloutBatch


@dataclass(frozen=True)
class FrozenModel:
    """One model as inference uses it: its single stage, its parked weights and its tensor-parallel group."""

    stage: PipelineStage
    parked: ParkedWeights
    tp_group: dist.ProcessGroup


class Rewarder(Protocol):
    """Scores samples outside the models, beside generation and inference.

    Each instance's leader has one. What it says stays apart from a rollout's `score`, the reward model's: the gather
    at the end brings all of it to every rank as `GenInferReport.function_scores`, sample id -> score.
    """

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Take finished samples; returns at once."""

    def finish(self) -> dict[int, float]:
        """Sample id -> score of everything submitted since the last call; waits. Raises RewardError."""


def pack_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions of `lengths` in packs of at most `budget` tokens, longest first, so that all stay busy.

    A longer sample than the budget is a pack of its own. Ties keep the order given.
    """
    packs: list[list[int]] = []
    room = 0
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not packs or lengths[position] > room:
            packs.append([])
            room = budget
        packs[-1].append(position)
        room -= lengths[position]
    return packs


class Scorer:
    """Those of reference, critic and reward model that the run has, of one inference replica."""

    def __init__(
        self, reference: FrozenModel | None, critic: FrozenModel | None, reward: FrozenModel | None, *,
        vocab: int, temperature: float, device: torch.device,
    ) -> None:  # fmt: skip
        self._reference, self._critic, self._reward = reference, critic, reward
        self._vocab = vocab
        self._temperature = temperature
        self._device = device
        self.observations: list[tuple[int, int, float]] = []  # (tokens, samples, seconds) of each pack
        self.load_seconds = 0.0

    @property
    def _models(self) -> tuple[FrozenModel, ...]:
        return tuple(model for model in (self._reference, self._critic, self._reward) if model)

    def finish_load(self) -> None:
        """Bring the weights in, all models at the same time; returns when they can be used."""
        start = time.perf_counter()
        for model in self._models:
            model.parked.begin_load()
        for model in self._models:
            model.parked.finish_load()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies are only queued so far, and are to be timed
        self.load_seconds = time.perf_counter() - start

    def release(self) -> None:
        for model in self._models:
            model.parked.release()

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Each rollout with ref_logprobs, values and score; one pack. Weights must be loaded."""
        start = time.perf_counter()
        batch = RolloutBatch.from_rollouts(sorted(rollouts, key=lambda r: r.sample_id))
        ordered = sorted(rollouts, key=lambda r: r.sample_id)
        packed = PackedTokens.pack([r.prompt_tokens + r.response_tokens for r in ordered], self._device)
        predict = batch.prediction_index.to(self._device)
        targets = batch.tokens[batch.response_index].to(self._device)
        ref, values, scores = [None] * len(ordered), [None] * len(ordered), [None] * len(ordered)
        responses = batch.response_lengths.tolist()
        if self._reference:
            logits = self._reference.stage.forward(packed, None)[predict]
            logprobs, _ = token_logprobs(logits, targets, self._vocab, self._temperature, self._reference.tp_group)
            ref = logprobs.cpu().split(responses)
        if self._critic:
            values = self._critic.stage.forward(packed, None)[predict].float().cpu().split(responses)
        if self._reward:
            last = (batch.cu_seqlens[1:].long() - 1).to(self._device)
            scores = self._reward.stage.forward(packed, None)[last].float().cpu().tolist()
        parts = zip(ordered, ref, values, scores)
        out = [rollout.with_scores(ref_logprobs=r, values=v, score=s) for rollout, r, v, s in parts]
        self.observations.append((len(batch.tokens), len(ordered), time.perf_counter() - start))
        return out
