"""A stop text ends a response with the token that completes it: neither earlier, nor later, nor from the prompt."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.gen_models import engine_of
from testkit.profiles import examples
from testkit.tiny import write_text_tokenizer
from transformers import AutoTokenizer, StopStringCriteria

from rlhfuse.gen.engine import Engine, SamplingParams
from rlhfuse.gen.stop_text import completes_stop_text, read_tokenizer, text_before_stop

PIECES = [b"", b"a", b"b", b" ", b"ab", b"aab", "é".encode(), "é".encode()[:1], "é".encode()[1:], "漢".encode()[:1]]
PIECES += ["漢".encode()[1:2], "漢".encode()[2:], "漢b a".encode()]


def spell(tokens: list[int]) -> str:
    return b"".join(PIECES[t % len(PIECES)] for t in tokens).decode(errors="replace")


def completed(tokens: list[int], stops: tuple[str, ...]) -> list[int]:
    """Where in the text stop texts begin that the last token completes, by the whole text."""
    before, text = spell(tokens[:-1]), spell(tokens)
    same = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
    return [i for stop in stops for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > same]


def first_stop(tokens: list[int], stops: tuple[str, ...]) -> list[int]:
    """Lengths at which a stop text is complete that was not so one token before."""
    return [end for end in range(1, len(tokens) + 1) if completed(tokens[:end], stops)]


@pytest.mark.parametrize(
    ("pieces", "stop", "ends"),
    [
        ([b"a", b"b", b" ", b"a"], "b a", [4]),  # spans tokens
        ([b"a", b"aab", b"b"], "aa", [2]),  # inside a token
        (["漢".encode()[:1], "漢".encode()[1:2], "漢".encode()[2:], b"a"], "漢", [3]),  # bytes split over tokens
        ([b"a", "é".encode()[:1], "é".encode()[1:], b"b"], "aéb", [4]),
        ([b"ab", b"b", b"ab"], "ab", [1, 3]),  # the second is new
        ([b"a", b"", b"", b"b"] + [b""] * 40 + [b"a"], "ba", [45]),  # tokens without text in between
    ],
)
def test_examples(pieces, stop, ends):
    tokens = [PIECES.index(piece) for piece in pieces]
    assert first_stop(tokens, (stop,)) == ends
    assert [n for n in range(1, len(tokens) + 1) if completes_stop_text(tokens[:n], (stop,), spell)] == ends


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60)
STOPS = st.lists(st.text("ab é漢", min_size=1, max_size=5), min_size=1, max_size=3)


@examples(300)
@given(TOKENS, STOPS)
def test_the_window_finds_what_the_whole_text_holds_and_the_text_is_cut_before_it(tokens, stops):
    stops = tuple(stops)
    ends = [n for n in range(1, len(tokens) + 1) if completes_stop_text(tokens[:n], stops, spell)]
    assert ends == first_stop(tokens, stops)
    cut, whole = text_before_stop(tokens, stops, lambda tokens, skip_special_tokens: spell(tokens)), spell(tokens)
    assert cut == whole[: min(completed(tokens, stops), default=None)]


@pytest.mark.parametrize(
    "tokens, stops, text",
    [
        ([3, 0, 4, 5], ("cd",), "ab"),  # begins in the token before the last: <s> is no text
        ([3, 0, 4, 1], ("</s>",), "abc"),
        ([3, 0, 4, 5], ("b<s>c",), "ab<s>cd"),  # complete before the last token
        ([3, 0, 4], ("b<s>c",), "a"),
        ([3, 1], (), "ab"),
        ([3, 4, 1], ("d",), "abc"),
    ],
)
def test_special_tokens_are_no_text_but_may_be_in_a_stop_text(tokens, stops, text):
    names = {0: "<s>", 1: "</s>", 3: "ab", 4: "c", 5: "d"}

    def decode(tokens, skip_special_tokens):
        return "".join(names[token] for token in tokens if token > 2 or not skip_special_tokens)

    assert text_before_stop(tokens, stops, decode) == text.replace("<s>", "")


@pytest.fixture
def engine() -> Engine:
    return engine_of(detokenize=spell)


def test_engine_ends_at_the_stop_text_and_min_tokens_passes_it_over(engine):
    free = engine.generate([[9]], SamplingParams(max_tokens=60, ignore_eos=True))[0].tokens
    stops = ("b ", "aa", "漢b")
    ends = first_stop(list(free), stops)
    assert len(ends) >= 3, "the example must hold several"
    for number, end in enumerate(ends[:3]):
        least = ends[number - 1] + 1 if number else 0
        params = SamplingParams(max_tokens=60, min_tokens=least, ignore_eos=True, stop=stops)
        result = engine.generate([[9]], params)[0]
        assert result.tokens == free[:end] and result.finish_reason == "stop"


def test_a_stop_text_in_the_prompt_or_across_its_end_is_not_one(engine):
    prompt, params = [9, 14, 15], SamplingParams(max_tokens=12, ignore_eos=True)
    free = list(engine.generate([prompt], params)[0].tokens)
    across = next(spell(prompt)[-1] + c for c in "ab é漢" if spell(prompt)[-1] + c not in spell(free))
    for stop in (across, spell(prompt), spell(prompt)[-1] + spell(free)[:1]):
        result = engine.generate([prompt], replace(params, stop=(stop,)))[0]
        assert list(result.tokens) == free[: (first_stop(free, (stop,)) or [12])[0]]


@pytest.mark.parametrize("drops_space", [False, True])
def test_stop_texts_are_found_where_transformers_finds_them_from_the_first_token_on(tmp_path, drops_space):
    tokenizer = AutoTokenizer.from_pretrained(str(write_text_tokenizer(tmp_path, drops_space)))
    detokenize, rng = read_tokenizer(tmp_path), random.Random(3)
    words = [number for token, number in tokenizer.get_vocab().items() if number > 2 and not token.startswith("<0x")]
    for _ in range(40):
        tokens = rng.choices(words, k=8)
        text = detokenize([1, *tokens])[3:]
        for at in (0, 0, 1, 4):
            if "\ufffd" in (stop := text[at : at + rng.randint(1, 3)]) or not stop:
                continue
            finds = StopStringCriteria(tokenizer, [stop])
            theirs = [end for end in range(1, 9) if finds(torch.tensor([tokens[:end]]), None).all()][:1]
            ours = [end for end in range(1, 9) if completes_stop_text(tokens[:end], (stop,), detokenize)][:1]
            cut = text_before_stop(tokens[: theirs[0]], (stop,), tokenizer.decode)
            assert ours == theirs and tokenizer.decode(tokens).startswith(cut) and len(cut) <= text.index(stop)
