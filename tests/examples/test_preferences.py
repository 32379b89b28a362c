"""The learning-rate curve and the Bradley-Terry loop, on models small enough to know the answer."""

import math
import random

import pytest
import torch
from preferences import TokenPair, pair_batches, preference_loss, train_reward
from pretraining import FitSettings


def test_learning_rate_rises_then_falls_to_a_twentieth():
    plan = FitSettings(steps=100, lr=1.0, warmup_steps=10)
    rates = [plan.learning_rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:])) and rates[100] == pytest.approx(0.05)


def test_preference_loss_is_bradley_terry_plus_centring():
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2
    assert preference_loss(chosen, rejected, 0.0).item() == pytest.approx(expected, rel=1e-5)
    assert preference_loss(chosen, rejected, 0.1).item() == pytest.approx(expected + 0.1 * (1 + 4) / 2, rel=1e-5)


class BagOfTokens(torch.nn.Module):
    """Score = mean over the tokens that are not padding of one number per token kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 4)
        self.score = torch.nn.Linear(4, 1, bias=False)

    def forward(self, input_ids, attention_mask, use_cache):
        mask = attention_mask[:, :, None].float()
        hidden = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return type("Output", (), {"logits": self.score(hidden)})


def test_reward_training_learns_an_order_and_unit_scale():
    """Token 5 is liked and token 6 is not, whatever the length."""
    rng = random.Random(0)
    pairs = [TokenPair([5] * rng.randint(1, 9) + [7], [6] * rng.randint(1, 9) + [7]) for _ in range(200)]
    torch.manual_seed(0)
    result = train_reward(BagOfTokens(), pairs, 0, seed=1, epochs=200)
    assert result.accuracy == 1.0 and (result.train_pairs, result.eval_pairs) == (180, 20)
    assert result.score_std == pytest.approx(1.0, abs=1e-4)
    assert abs(result.score_mean) < 0.5


def test_pair_batches_use_every_pair_once_an_epoch():
    pairs = [TokenPair([i], [i, i]) for i in range(37)]
    batches = pair_batches(pairs, 4, random.Random(0))
    seen = [pair.chosen[0] for _ in range(10) for pair in next(batches)]
    assert sorted(seen) == list(range(37))
