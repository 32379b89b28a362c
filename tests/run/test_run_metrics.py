"""What an iteration's line is made of: scores by their weights, and metrics computed from other metrics."""

from __future__ import annotations

import pytest
import torch

from rlhfuse.config.settings import RewardConfig
from rlhfuse.costs.flops import IterationFlops
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.run_metrics import memory_metrics, mfu_metrics, rewarded

SECONDS = {"timing_s/train": 4.0, "fusion/gen_infer_seconds": 2.0, "timing_s/step": 10.0}


def test_utilisation_is_of_all_ranks_for_the_seconds_that_it_took():
    flops = IterationFlops(generation=3e12, inference=1e12, training={"actor": 8e12, "critic": 2e12})
    found = mfu_metrics(flops, SECONDS, ranks=4, peak_flops=1e12)
    assert found == pytest.approx(
        {
            "perf/mfu/actor": 8 / (4 * 4),
            "actor/mfu": 8 / (4 * 4),
            "perf/mfu/critic": 2 / (4 * 4),
            "perf/mfu/gen_infer": 4 / (2 * 4),
            "perf/mfu/step": 14 / (10 * 4),
        }
    )


def test_without_a_critic_or_a_peak():
    flops = IterationFlops(3e12, 0.0, {"actor": 8e12})
    assert "perf/mfu/critic" not in mfu_metrics(flops, SECONDS, 4, 1e12)
    assert mfu_metrics(flops, SECONDS, 4, None) == {}


def test_memory_is_that_of_the_fullest_rank():
    ranks = [{"peaks": {"base": 1e9, "generation": 3e9}}, {"peaks": {"base": 2e9, "generation": 2.5e9}}]
    assert memory_metrics(ranks) == {
        "perf/peak_memory_gb/base": 2.0,
        "perf/peak_memory_gb/generation": 3.0,
        "perf/max_memory_allocated_gb": 3.0,
    }


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
