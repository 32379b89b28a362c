"""Packing, the learning-rate curve and the Bradley-Terry loop, on models small enough to know the answer."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfuse.errors import InputError
from rlhfuse.models.fitting import FitSettings
from rlhfuse.models.output_folder import output_folder
from rlhfuse.models.pretraining import next_token_loss, pack, window_batches
from rlhfuse.models.reward_training import RewardSettings, TokenPair, pair_batches, preference_loss, train_reward

TEXTS = [[1, 5, 6, 7, 2], [1, 9, 8, 2], [1, 4, 4, 4, 4, 2]]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    texts=st.lists(st.lists(st.integers(3, 40), min_size=1, max_size=15), min_size=1, max_size=12),
    window=st.integers(4, 20),
)
def test_packing_keeps_every_text_and_its_own_positions(texts, window):
    unpacked, learnt = [], 0
    for tokens, positions, targets in pack(texts, window):
        assert len(tokens) == len(positions) == len(targets) == window
        learnt += int((targets != -100).sum())
        starts = [i for i in range(window) if positions[i] == 0] + [window]
        unpacked += [tokens[a:b].tolist() for a, b in zip(starts, starts[1:])]
    cut = [text[:window] for text in texts]
    assert [text for text in unpacked if any(text)] == cut  # what is left over is filled with zeros
    assert learnt == sum(len(text) - 1 for text in cut)


def test_packed_loss_is_the_loss_of_the_texts_alone():
    """Guards the separation of texts: with a cache switched on, a text would attend to its neighbours."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config)
    packed = next_token_loss(model, next(window_batches(pack(TEXTS, 12), 2, random.Random(0))))
    alone = sum(
        torch.nn.functional.cross_entropy(
            model(input_ids=torch.tensor([text])).logits[0, :-1], torch.tensor(text[1:]), reduction="sum"
        )
        for text in TEXTS
    )
    assert torch.allclose(packed, alone / sum(len(text) - 1 for text in TEXTS), atol=1e-5)


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
    result = train_reward(BagOfTokens(), pairs, 0, RewardSettings(epochs=6, lr=0.1), lambda line: None)
    assert result.accuracy == 1.0 and (result.train_pairs, result.eval_pairs) == (180, 20)
    assert result.score_std == pytest.approx(1.0, abs=1e-4)
    assert abs(result.score_mean) < 0.5


def test_pair_batches_use_every_pair_once_an_epoch():
    pairs = [TokenPair([i], [i, i]) for i in range(37)]
    batches = pair_batches(pairs, 4, random.Random(0))
    seen = [pair.chosen[0] for _ in range(10) for pair in next(batches)]
    assert sorted(seen) == list(range(37))


def test_settings_out_of_range_are_named():
    for wrong in ({"epochs": 0}, {"lr": 0.0}, {"batch_pairs": 0}, {"eval_fraction": 0.0}, {"center_coef": -1.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            RewardSettings(**wrong)


def test_an_output_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        with output_folder(out) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError
    assert not list(tmp_path.iterdir())
    for text in ("one", "two"):
        with output_folder(out, force=True) as folder:
            (folder / "file").write_text(text)
    assert (out / "file").read_text() == "two" and [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(InputError, match="--force"):
        with output_folder(out):
            pass
