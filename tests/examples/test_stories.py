"""The story grammar: same seed same text, a tail of lengths, moods in balance; the packing of texts for training."""

import random

import numpy as np
import stories
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretraining import next_token_loss, pack, window_batches
from testkit.profiles import examples
from testkit.tiny import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM


@examples(30)
@given(seed=st.integers(0, 2**40), purpose=st.text(max_size=8))
def test_same_seed_and_purpose_give_the_same_story(seed, purpose):
    one, two = (stories.generator(seed, purpose) for _ in range(2))
    assert stories.draw_story(one) == stories.draw_story(two)
    assert stories.draw_pair(one) == stories.draw_pair(two)
    others = [stories.generator(seed, f"{purpose}!"), stories.generator(seed + 1, purpose)]
    assert len({stories.draw_pair(rng) for rng in (stories.generator(seed, purpose), *others)}) == 3


def test_held_out_openings_never_introduce_a_training_hero():
    rng = stories.generator(1, "heroes")
    training = {(o.hero.name, o.hero.animal) for o in (stories.draw_opening(rng) for _ in range(4000))}
    held_out = {(o.hero.name, o.hero.animal) for o in (stories.draw_opening(rng, held_out=True) for _ in range(2000))}
    assert training and held_out and not training & held_out


def test_the_chosen_response_is_the_gladder_one():
    glad, sad = ("happy", "hugged", "kind to", "smiled"), ("very sad", "pushed", "angry", "frowned")
    rng = stories.generator(1, "order")

    def gladness(text: str) -> int:
        return sum(text.count(word) for word in glad) - sum(text.count(word) for word in sad)

    pairs = [stories.draw_pair(rng) for _ in range(1000)]
    assert np.mean([gladness(pair.chosen) - gladness(pair.rejected) for pair in pairs]) > 0.3


# packing, on a model small enough to know the answer

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


def test_packed_loss_is_the_loss_of_the_texts_alone():
    """Guards the separation of texts: with a cache switched on, a text would attend to its neighbours."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.5))
    packed = next_token_loss(model, next(window_batches(pack(TEXTS, 12), 2, random.Random(0))))
    alone = sum(
        torch.nn.functional.cross_entropy(
            model(input_ids=torch.tensor([text])).logits[0, :-1], torch.tensor(text[1:]), reduction="sum"
        )
        for text in TEXTS
    )
    assert torch.allclose(packed, alone / sum(len(text) - 1 for text in TEXTS), atol=1e-5)
