"""What an iteration takes from its batch for the next ones; whole iterations are in test_whole_runs.py."""

from types import SimpleNamespace

import torch

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.adaptive import KLController, RunningMoments
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.trainer import Trainer


def test_a_failed_sample_moves_neither_the_scale_of_scores_nor_the_weight_of_the_kl():
    trainer = Trainer.__new__(Trainer)
    algorithm = AlgorithmConfig(scale_scores=True, kl_coef=0.1, kl_target=6.0)
    trainer.config = SimpleNamespace(algorithm=algorithm, held_iterations=lambda _: 0)
    trainer.scores, trainer.kl = RunningMoments(), KLController(0.1, target=6.0, horizon=100)
    rollouts = [
        Rollout(i, (1,), (2,), torch.zeros(1), "stop", torch.full((1,), -kl), score=score, failed=i == 1)
        for i, (kl, score) in enumerate([(6.0, 1.0), (19.0, 90.0), (6.6, 5.0)])
    ]
    batch = RolloutBatch.from_rollouts(rollouts)
    assert trainer._effective_config(batch).score_scale == 1 / 2 and trainer.scores.count == 2
    trainer._steer(0, batch)
    assert trainer.kl == KLController(0.1, target=6.0, horizon=100).after(
        torch.tensor([6.0, 6.6]).double().mean().item(), 2
    )
    before = trainer.scores, trainer.kl
    trainer._effective_config(batch.select([1]))
    trainer._steer(0, batch.select([1]))
    assert (trainer.scores, trainer.kl) == before
