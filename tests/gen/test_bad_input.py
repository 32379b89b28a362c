"""What an engine refuses, in which words, and that it serves on as if nothing had been asked.

Each refusal comes to a busy engine, by `add` and by `generate` to an idle one; afterwards the samples that were on
their way give what they give alone, and no block is missing.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from testkit.gen_models import random_weights, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
SPEC = tiny_spec(context=128)
WEIGHTS = random_weights(SPEC)
FRIENDS = [[9, 10, 11], [12] * 20, list(range(30, 60))]


def make(weights=WEIGHTS, **options) -> Engine:
    return Engine(SPEC, weights, EngineOptions(**(dict(num_blocks=7, block_tokens=16) | options)))


@pytest.fixture(scope="module")
def friends() -> list:
    return [make().generate([prompt], SAMPLED, [i])[0] for i, prompt in enumerate(FRIENDS)]


def check_usable(engine: Engine, friends: list, results: list) -> None:
    engine.check_integrity()
    while engine.has_unfinished():
        results += engine.step()
        engine.check_integrity()
    assert sorted(results, key=lambda r: r.sample_id) == friends
    assert engine.generate(FRIENDS, SAMPLED) == friends
    assert engine.free_blocks == engine.options.num_blocks


BAD_PROMPTS = {
    "no tokens": ([], GREEDY, "sample 77 has an empty prompt"),
    "past the vocabulary": ([5, 301], GREEDY, r"sample 77: token 301 is not an id in \[0, 301\)"),
    "far past": ([2**40], GREEDY, "token 1099511627776"),
    "negative": ([-1, 5], GREEDY, "token -1"),
    "a float": ([1.0], GREEDY, "token 1.0"),
    "a text": (["a"], GREEDY, "token 'a'"),
    "fills the context": ([1] * 128, GREEDY, "128 prompt tokens and max_tokens=8 leave the context of 128"),
    "beyond the context": ([1] * 500, GREEDY, "500 prompt tokens and max_tokens=8 leave the context of 128"),
    "beyond the cache": ([1] * 106, GREEDY, "106 prompt .* leave the KV cache of 112 tokens; raise num_blocks"),
    "response beyond the cache": ([1], SamplingParams(max_tokens=127), "max_tokens=127 leave the KV cache of 112"),
    "stop token past the vocabulary": ([1], SamplingParams(stop_token_ids=(3, 301)), "sample 77: stop token 301"),
    "stop text without tokenizer": ([1], SamplingParams(stop="x"), "stop texts need a tokenizer"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompt_is_refused(friends, case):
    prompt, params, words = BAD_PROMPTS[case]
    engine = make()
    for i, friend in enumerate(FRIENDS):
        engine.add(i, friend, SAMPLED)
    results = [result for _ in range(3) for result in engine.step()]
    with pytest.raises(InputError, match=words):
        engine.add(77, prompt, params)
    with pytest.raises(InputError, match="sample 77 is not unfinished"):
        engine.abort(77)
    check_usable(engine, friends, results)
    with pytest.raises(InputError, match=words.replace("sample 77", "sample 1")):
        engine.generate([[5], prompt, [6]], [GREEDY, params, GREEDY])
    assert not engine.has_unfinished()
    check_usable(engine, friends, list(friends))


def test_the_largest_that_fits_is_served():
    engine = make()
    assert len(engine.generate([[1] * 105], GREEDY)[0].tokens) == 8  # 112 tokens are run: seven blocks exactly
    assert len(make(num_blocks=8).generate([[1] * 120], GREEDY)[0].tokens) == 8  # the whole context


def test_prompts_may_be_arrays_and_tensors():
    prompt = [5, 6, 7]
    results = make().generate([prompt, np.array(prompt), torch.tensor(prompt)], GREEDY)
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert all(type(token) is int for result in results for token in result.prompt_tokens)


def test_max_tokens_may_not_leave_the_context():
    engine = make(num_blocks=8)
    with pytest.raises(InputError, match="100 prompt tokens and max_tokens=29 leave the context of 128"):
        engine.add(1, [1] * 100, SamplingParams(max_tokens=29))
    whole = engine.generate([[1] * 100], SamplingParams(max_tokens=28, ignore_eos=True))[0]
    assert len(whole.tokens) == 28 and whole.finish_reason == "length"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature=math.inf), "temperature=inf"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(top_p=math.nan), "top_p=nan"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_k=2.5), "top_k=2.5"),
        (dict(max_tokens=0), "max_tokens=0"),
        (dict(max_tokens=-3), "max_tokens=-3"),
        (dict(min_tokens=-1), "min_tokens=-1"),
        (dict(min_tokens=9, max_tokens=8), "min_tokens=9 > max_tokens=8"),
        (dict(stop=("ok", "")), "empty text"),
        (dict(seed=1.5), "seed=1.5"),
        (dict(seed=None), "seed=None"),
        (dict(top_k=True), "top_k=True"),
        (dict(temperature="1"), "temperature='1'"),
        (dict(top_p=None), "top_p=None"),
        (dict(stop_token_ids=(5, 1.5)), "stop_token_ids"),
    ],
    ids=str,
)
def test_contradicting_sampling_values_are_refused_by_name(bad, words):
    with pytest.raises(InputError, match=words):
        SamplingParams(**bad)


def test_ids_and_counts_that_do_not_fit(friends):
    engine = make()
    for i, friend in enumerate(FRIENDS):
        engine.add(i, friend, SAMPLED)
    results = engine.step()
    with pytest.raises(InputError, match="sample 1 is already in the engine"):
        engine.add(1, [5], GREEDY)
    with pytest.raises(InputError, match="3 samples are unfinished"):
        engine.generate([[5]], GREEDY)
    for sample_id in ("a", 1.5, None):
        with pytest.raises(InputError, match=f"sample id {sample_id!r} must be an integer"):
            engine.add(sample_id, [5], GREEDY)
    with pytest.raises(InputError, match="sample 9 is not unfinished"):
        with engine.export_sequences([0, 9]):
            pass
    check_usable(engine, friends, results)
    with pytest.raises(InputError, match="2 prompts, 1 params, 2 sample ids"):
        engine.generate([[5], [6]], [GREEDY])
    with pytest.raises(InputError, match="one id twice"):
        engine.generate([[5], [6]], GREEDY, [3, 3])
    check_usable(engine, friends, list(friends))


@pytest.mark.parametrize("options", [dict(num_blocks=0), dict(block_tokens=0), dict(max_sequences=-1)], ids=str)
def test_sizes_of_an_engine(options):
    with pytest.raises(InputError, match=next(iter(options))):
        make(**options)


@pytest.mark.parametrize("limit", [dict(top_k=1), dict(top_p=1e-6), dict(top_k=2, top_p=0.5)], ids=str)
def test_tokens_banned_by_min_tokens_leave_others_to_draw(limit):
    """The most likely token ends the response and may not be drawn yet: the next likely one is, not an error."""
    engine = make()
    greedy = engine.generate([[9, 10]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
    ends = dict(ignore_eos=True, stop_token_ids=greedy.tokens, max_tokens=1, min_tokens=1)
    second = engine.generate([[9, 10]], SamplingParams(temperature=0, **ends))[0]
    drawn = [engine.generate([[9, 10]], SamplingParams(seed=s, **limit, **ends))[0] for s in range(20)]
    assert all(r.finish_reason == "length" and greedy.tokens != r.tokens for r in drawn)
    assert second in drawn
    if limit.get("top_k") != 2:
        assert all(r == second for r in drawn)


def poisoned(token: int, value: float) -> dict:
    """Weights whose embedding of one token is not finite; the logits of that token stay as they were."""
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    weights["embedding.word_embeddings.weight"][token] = value
    return weights


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_logits_fail_their_own_sample_with_its_id(value):
    """Samples that draw token P fail at the next step, with what they drew; the others keep every bit.

    Their blocks go back and are used again by samples that must not notice: the engine is small, so all are.
    """
    prompts = [[20 + i, 9] for i in range(30)]
    healthy = [make().generate([prompt], SAMPLED, [i])[0] for i, prompt in enumerate(prompts)]
    drawn = [token for result in healthy for token in result.tokens[:-1]]
    token = max(sorted(set(drawn)), key=drawn.count)
    assert not any(token in prompt for prompt in prompts)
    for options in (dict(), dict(max_batched_tokens=5), dict(num_blocks=2)):
        engine = make(poisoned(token, value), **options)
        for i, prompt in enumerate(prompts):
            engine.add(i, prompt, SAMPLED)
        results = []
        while engine.has_unfinished():
            results += engine.step()
            engine.check_integrity()
        assert sorted(r.sample_id for r in results) == list(range(30))
        failed = 0
        for result in results:
            good = healthy[result.sample_id]
            if token in good.tokens[:-1]:
                upto = good.tokens.index(token) + 1
                assert result.finish_reason == "error"
                assert result.tokens == good.tokens[:upto] and result.logprobs == good.logprobs[:upto]
                failed += 1
            else:
                assert result == good
        assert 0 < failed < 30
        assert engine.free_blocks == engine.options.num_blocks
        assert engine.generate([prompts[0]], SAMPLED)[0].tokens  # serves on


def test_prompt_with_a_poisoned_token_fails_before_its_first_token():
    engine = make(poisoned(50, math.nan))
    results = engine.generate([[9, 11], [9, 50, 11], [50] * 40], GREEDY)
    assert [r.finish_reason for r in results] == ["length", "error", "error"]
    assert results[1].tokens == results[2].tokens == () and results[1].sample_id == 1
    assert engine.generate([[9, 11]], GREEDY)[0] == results[0]
