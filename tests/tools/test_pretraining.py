"""Packing of texts for the tiny models' training, on a model small enough to know the answer."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from tiny_models.pretraining import next_token_loss, pack, window_batches
from transformers import LlamaConfig, LlamaForCausalLM

TEXTS = [[1, 5, 6, 7, 2], [1, 9, 8, 2], [1, 4, 4, 4, 4, 2]]


@examples(60)
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


def test_what_is_given_is_not_learnt():
    (window,) = pack([[1, 5, 6, 7, 2], [1, 9, 8, 2]], 12, given=[3, 1])
    assert window.targets.tolist() == [-100, -100, 7, 2, -100, 9, 8, 2, -100, -100, -100, -100]


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
