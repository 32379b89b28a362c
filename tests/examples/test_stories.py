"""The story grammar: same seed same text, a tail of lengths, moods in balance; the packing of texts for training."""

import random

import numpy as np
import pytest
import stories
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretraining import next_token_loss, pack, window_batches
from testkit.profiles import examples
from testkit.tiny import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def responses():
    rng = stories.generator(3, "test")
    openings = [stories.draw_opening(rng) for _ in range(6000)]
    return [stories.draw_response(rng, opening) for opening in openings]


@examples(30)
@given(seed=st.integers(0, 2**40), purpose=st.text(max_size=8))
def test_same_seed_and_purpose_give_the_same_story(seed, purpose):
    one, two = (stories.generator(seed, purpose) for _ in range(2))
    assert stories.draw_story(one) == stories.draw_story(two)
    assert stories.draw_pair(one) == stories.draw_pair(two)
    others = [stories.generator(seed, f"{purpose}!"), stories.generator(seed + 1, purpose)]
    assert len({stories.draw_pair(rng) for rng in (stories.generator(seed, purpose), *others)}) == 3


@examples(50)
@given(seed=st.integers(0, 10**6))
def test_a_story_is_filled_in_and_ends_with_a_sentence(seed):
    text = stories.draw_story(stories.generator(seed, "text"))
    assert "{" not in text and "  " not in text
    assert text.endswith((".", '!"'))
    assert text[0].isupper()


def test_lengths_have_a_long_tail_in_sentences(responses):
    p50, p99 = np.percentile([response.sentences for response in responses], [50, 99])
    assert p99 / p50 >= 4
    assert np.mean([response.sentences > 45 for response in responses]) < 0.02


def test_moods_balance_and_do_not_depend_on_length(responses):
    moods = np.array([response.mood for response in responses])
    lengths = np.array([response.sentences for response in responses])
    assert abs(moods.mean()) < 0.03
    assert 0.3 < moods.std() < 0.9
    assert abs(np.corrcoef(moods, lengths)[0, 1]) < 0.05


def test_mood_is_the_mean_over_sentences_that_have_one():
    """Counted again from the text, by the templates' own words."""
    opening = stories.Opening("x", stories.Hero("Anna", "she", "her", "her", "fox", "bear", "hat"), False)
    rng = stories.generator(5, "moods")
    drawn = [stories.draw_response(rng, opening) for _ in range(3000)]
    for words, mood in ((("happy", "hugged", "sweet"), 1.0), (("very sad", "pushed", "mean word"), -1.0)):
        alone = [one.mood for one in drawn if one.sentences == 1 and any(word in one.text for word in words)]
        assert alone and set(alone) == {mood}


def test_held_out_openings_never_introduce_a_training_hero():
    rng = stories.generator(1, "heroes")
    training = {(o.hero.name, o.hero.animal) for o in (stories.draw_opening(rng) for _ in range(4000))}
    held_out = {(o.hero.name, o.hero.animal) for o in (stories.draw_opening(rng, held_out=True) for _ in range(2000))}
    assert training and held_out and not training & held_out


def test_noise_turns_pairs_round_at_its_rate():
    """The draws of a pair come before that of its noise, so the same seed gives the same two texts."""
    for seed in range(30):
        right, turned = (stories.draw_pair(stories.generator(seed, "noise"), noise=noise) for noise in (0.0, 1.0))
        assert (right.chosen, right.rejected) == (turned.rejected, turned.chosen)
    rng_right, rng_noisy = (stories.generator(1, "rate") for _ in range(2))
    turned = sum(stories.draw_pair(rng_right) != stories.draw_pair(rng_noisy, noise=0.3) for _ in range(1000))
    assert 240 < turned < 360


def test_the_chosen_response_is_the_gladder_one():
    glad, sad = ("happy", "hugged", "kind to", "smiled"), ("very sad", "pushed", "angry", "frowned")
    rng = stories.generator(1, "order")

    def gladness(text: str) -> int:
        return sum(text.count(word) for word in glad) - sum(text.count(word) for word in sad)

    pairs = [stories.draw_pair(rng) for _ in range(1000)]
    assert np.mean([gladness(pair.chosen) - gladness(pair.rejected) for pair in pairs]) > 0.3


def test_prompts_differ_and_repeat_for_a_seed():
    one, two = (stories.draw_prompts(stories.generator(9, "prompts"), 300) for _ in range(2))
    assert one == two and len(set(one)) == 300


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


def test_what_is_given_is_not_learnt():
    (window,) = pack([[1, 5, 6, 7, 2], [1, 9, 8, 2]], 12, given=[[(0, 3)], [(0, 1), (2, 3)]])
    assert window.targets.tolist() == [-100, -100, 7, 2, -100, 9, -100, 2, -100, -100, -100, -100]


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
