"""The batch's own metrics on numbers that can be checked by eye."""

import pytest
import torch

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.advantage import add_advantages
from rlhfuse.ppo.metrics import balance_metrics, batch_metrics
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards


def test_batch_metrics():
    old, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    rollouts = [
        Rollout(0, (1, 1, 1), (2, 2), old, "stop", ref, torch.zeros(2), 1.0),
        Rollout(1, (1,), (2,), old[:1], "length", ref[:1], torch.ones(1), 3.0),
    ]
    algorithm = AlgorithmConfig(kl_coef=0.1, gamma=1.0, lam=1.0)
    batch = add_advantages(add_token_rewards(RolloutBatch.from_rollouts(rollouts), algorithm, 8), algorithm)
    metrics = batch_metrics(batch, algorithm)
    expected = {
        "critic/score/mean": 2.0,
        "critic/rewards/max": 2.95,
        "critic/rewards/min": 0.95,
        "critic/returns/max": 2.95,
        "critic/values/mean": 1 / 3,
        "response_length/mean": 1.5,
        "response_length/clip_ratio": 0.5,
        "prompt_length/max": 3.0,
        "actor/ref_kl": 1 / 3,
        "actor/kl_coef": 0.1,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "critic/score_scale" not in metrics
    scaled = algorithm.with_(scale_scores=True, score_scale=0.25)
    assert batch_metrics(batch, scaled)["critic/score_scale"] == 0.25
    assert metrics["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)


def test_a_failed_sample_is_in_the_lengths_alone():
    def rollout(sample: int, length: int, score: float, failed: bool = False) -> Rollout:
        numbers = torch.full((length,), -1.0 - sample)
        return Rollout(sample, (1,), (2,) * length, numbers, "stop", numbers - score, numbers, score, failed=failed)

    def metrics(*rollouts: Rollout) -> dict[str, float]:
        batch = add_token_rewards(RolloutBatch.from_rollouts(rollouts), algorithm, 8)
        return batch_metrics(add_advantages(batch, algorithm), algorithm)

    algorithm = AlgorithmConfig(kl_coef=0.1)
    alone = metrics(rollout(0, 2, 1.0), rollout(2, 3, 4.0))
    beside = metrics(rollout(0, 2, 1.0), rollout(1, 7, 90.0, failed=True), rollout(2, 3, 4.0))
    assert alone["critic/score/std"] == 1.5 and beside["response_length/max"] == 7.0
    of_lengths = {name for name in alone if name.startswith("response_length")}
    assert {name: beside[name] for name in alone.keys() - of_lengths} == {
        name: alone[name] for name in alone.keys() - of_lengths
    }
    none = metrics(rollout(0, 2, 1.0, failed=True))
    assert "critic/score/mean" not in none and "actor/ref_kl" not in none and none["response_length/mean"] == 2.0


def test_balance_metrics():
    assert balance_metrics([9, 8, 1, 2], [10, 10]) == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 17,
        "global_seqlen/balanced_min": 10,
        "global_seqlen/balanced_max": 10,
    }
