"""A batch's scores: what reward model and function said, by their weights and by sample id."""

from __future__ import annotations

import pytest
import torch

from rlhfuse.config import RewardConfig
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run_metrics import rewarded


def batch_of(scores: list[float | None]) -> RolloutBatch:
    """Samples 10, 11, ... with what the reward model said of them."""
    rollouts = [Rollout(10 + i, (1,), (2,), [-1.0], "stop", score=score) for i, score in enumerate(scores)]
    return RolloutBatch.from_rollouts(rollouts)


SAID = {12: 100.0, 10: -10.0, 11: 0.0}


@pytest.mark.parametrize(
    "model, said, weights, expected",
    [
        ([1.0, 2.0, 3.0], {}, {}, [1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0], {}, {"model_weight": -0.5}, [-0.5, -1.0, -1.5]),
        ([None] * 3, SAID, {}, [-10.0, 0.0, 100.0]),
        ([None] * 3, SAID, {"function_weight": -2.0}, [20.0, 0.0, -200.0]),
        ([1.0, 2.0, 3.0], SAID, {}, [-9.0, 2.0, 103.0]),
        ([1.0, 2.0, 3.0], SAID, {"model_weight": 0.25, "function_weight": 0.5}, [-4.75, 0.5, 50.75]),
        ([1.0, 2.0, 3.0], SAID, {"model_weight": -1.0, "function_weight": 3.0}, [-31.0, -2.0, 297.0]),
    ],
)
def test_scores_are_the_weighted_sum_by_sample(model, said, weights, expected):
    batch = rewarded(batch_of(model), said, RewardConfig(path="m", function="f", **weights))
    assert batch.sample_ids.tolist() == [10, 11, 12]
    assert batch.scores.tolist() == expected and batch.scores.dtype == torch.float32


def test_a_sample_that_the_function_left_out_is_an_error():
    with pytest.raises(KeyError, match="11"):
        rewarded(batch_of([None] * 3), {10: 1.0, 12: 1.0}, RewardConfig(function="f"))
