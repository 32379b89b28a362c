"""Scores of reward model and function, by their weights."""

import pytest
import torch

from rlhfuse.config.settings import RewardConfig
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import combine_rewards


def batch_of(scores: list[float | None]) -> RolloutBatch:
    """Samples 10, 11, ... with the reward model's scores."""
    rollouts = [Rollout(10 + i, (1,), (2,), [-1.0], "stop", score=score) for i, score in enumerate(scores)]
    return RolloutBatch.from_rollouts(rollouts)


FUNCTION_SCORES = {12: 100.0, 10: -10.0, 11: 0.0}


@pytest.mark.parametrize(
    "model, function, weights, expected",
    [
        ([1.0, 2.0, 3.0], {}, {}, [1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0], {}, {"model_weight": -0.5}, [-0.5, -1.0, -1.5]),
        ([None] * 3, FUNCTION_SCORES, {}, [-10.0, 0.0, 100.0]),
        ([None] * 3, FUNCTION_SCORES, {"function_weight": -2.0}, [20.0, 0.0, -200.0]),
        ([1.0, 2.0, 3.0], FUNCTION_SCORES, {}, [-9.0, 2.0, 103.0]),
        ([1.0, 2.0, 3.0], FUNCTION_SCORES, {"model_weight": 0.25, "function_weight": 0.5}, [-4.75, 0.5, 50.75]),
        ([1.0, 2.0, 3.0], FUNCTION_SCORES, {"model_weight": -1.0, "function_weight": 3.0}, [-31.0, -2.0, 297.0]),
    ],
)
def test_scores_are_the_weighted_sum_by_sample(model, function, weights, expected):
    batch = combine_rewards(batch_of(model), function, RewardConfig(path="m", function="f", **weights))
    assert batch.sample_ids.tolist() == [10, 11, 12]
    assert batch.scores.tolist() == expected and batch.scores.dtype == torch.float32


def test_a_sample_that_the_function_left_out_is_an_error():
    with pytest.raises(KeyError, match="11"):
        combine_rewards(batch_of([None] * 3), {10: 1.0, 12: 1.0}, RewardConfig(function="f"))
