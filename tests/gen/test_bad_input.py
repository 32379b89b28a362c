"""What an engine refuses, in which words, and that it serves on as if nothing had been asked.

Each refusal comes to a busy engine, by `add` and by `generate` to an idle one; afterwards the samples that were on
their way give what they give alone, and no block is missing.
"""

import math
import re

import numpy as np
import pytest
import torch
from testkit.gen_models import PROMPTS, add_all, engine_of, random_weights, run_out, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
SPEC = tiny_spec(context=128)
WEIGHTS = random_weights(SPEC)
FRIENDS = [[9, 10, 11], [12] * 20, list(range(30, 60))]


def make(weights=WEIGHTS, **options) -> Engine:
    return engine_of(SPEC, weights, **(dict(num_blocks=7, block_tokens=16) | options))


@pytest.fixture(scope="module")
def friends() -> list:
    return [make().generate([prompt], SAMPLED, [i])[0] for i, prompt in enumerate(FRIENDS)]


def check_usable(engine: Engine, friends: list, results: list) -> None:
    assert run_out(engine, results=results) == friends
    assert engine.generate(FRIENDS, SAMPLED) == friends


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
    "nothing but stop tokens": ([1], SamplingParams(stop_token_ids=range(301), min_tokens=1), "every token ends it"),
    "stop text without tokenizer": ([1], SamplingParams(stop="x"), "stop texts need a tokenizer"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompt_is_refused(friends, case):
    prompt, params, words = BAD_PROMPTS[case]
    engine = make()
    results = add_all(engine, FRIENDS, SAMPLED, steps=3)
    with pytest.raises(InputError, match=words):
        engine.add(77, prompt, params)
    with pytest.raises(InputError, match="sample 77 is not unfinished"):
        engine.abort(77)
    check_usable(engine, friends, results)
    with pytest.raises(InputError, match=words.replace("sample 77", "sample 1")):
        engine.generate([[5], prompt, [6]], [GREEDY, params, GREEDY])
    assert not engine.has_unfinished()
    check_usable(engine, friends, friends)


def test_the_largest_that_fits_is_served():
    engine = make()
    assert len(engine.generate([[1] * 105], GREEDY)[0].tokens) == 8  # 112 tokens are run: seven blocks exactly
    whole = make(num_blocks=8).generate([[1] * 100], SamplingParams(max_tokens=28, ignore_eos=True))[0]
    assert len(whole.tokens) == 28 and whole.finish_reason == "length"  # the whole context


def test_prompts_may_be_arrays_and_tensors():
    prompt = [5, 6, 7]
    results = make().generate([prompt, np.array(prompt), torch.tensor(prompt)], GREEDY)
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert all(type(token) is int for result in results for token in result.prompt_tokens)


BAD_PARAMS = {
    "temperature": (-0.1, math.nan, math.inf, "1"),
    "top_p": (0.0, 1.5, math.nan, None),
    "top_k": (-1, 2.5, True),
    "max_tokens": (0, 1.5),
    "min_tokens": (-1,),
    "seed": (1.5, None),
}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        *(({name: value}, f"{name}={value!r}") for name, values in BAD_PARAMS.items() for value in values),
        (dict(min_tokens=9, max_tokens=8), "min_tokens=9 > max_tokens=8"),
        (dict(stop=("ok", "")), "empty text"),
        (dict(stop_token_ids=(5, 1.5)), "stop_token_ids"),
    ],
    ids=str,
)
def test_sampling_values_are_refused_by_name(bad, words):
    with pytest.raises(InputError, match=re.escape(words)):
        SamplingParams(**bad)


def test_ids_and_counts_that_do_not_fit(friends):
    engine = make()
    results = add_all(engine, FRIENDS, SAMPLED, steps=1)
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
    check_usable(engine, friends, friends)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_blocks=0), "num_blocks"),
        (dict(block_tokens=0), "block_tokens"),
        (dict(max_sequences=-1), "max_sequences"),
        (dict(draft_rows=-1), "draft_rows"),
        (dict(dtype=torch.float16), "dtype"),
        (dict(kernels="torch", draft_rows=4), "draft_rows=4: only CPU kernels"),
        (dict(kernels="cuda"), "kernels='cuda' is unknown"),
        (dict(attention="flash"), "attention='flash' is unknown; use one of auto, flashinfer, triton"),
        (dict(weights=WEIGHTS | {"output_layer.weight": torch.zeros(3, 3)}), "output_layer.weight"),
    ],
)
def test_options_and_weights_of_an_engine(options, words):
    with pytest.raises(InputError, match=words):
        make(**options)


def poisoned(token: int, value: float = math.nan, spec=SPEC) -> dict:
    """Weights whose embedding of one token is not finite; the logits of that token stay as they were."""
    weights = random_weights(spec)
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
        engine, failed = make(poisoned(token, value), **options), 0
        add_all(engine, prompts, SAMPLED)
        for result, good in zip(run_out(engine), healthy, strict=True):
            if token in good.tokens[:-1]:
                upto = good.tokens.index(token) + 1
                assert result.sample_id == good.sample_id and result.finish_reason == "error"
                assert result.tokens == good.tokens[:upto] and result.logprobs == good.logprobs[:upto]
                failed += 1
            else:
                assert result == good
        assert 0 < failed < 30
        assert engine.generate([prompts[0]], SAMPLED)[0].tokens  # serves on


@pytest.mark.parametrize("options", [dict(), dict(max_batched_tokens=9), dict(num_blocks=14)], ids=str)
def test_a_prompt_that_is_not_finite_fails_before_its_first_token_and_changes_no_other(options):
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, top_p=(1, 0.9)[i % 2]) for i in range(8)]
    expected = engine_of().generate(PROMPTS, params)
    met = {token for result in expected for token in result.prompt_tokens + result.tokens}
    poison = next(token for token in range(10, 301) if token not in met)  # only the bad samples meet it
    engine = engine_of(weights=poisoned(poison, spec=tiny_spec()), **options)
    bad = [[9] * 3 + [poison] + [9] * 30, [poison], PROMPTS[5][:40] + [poison]]  # the last shares two blocks
    mixed = [bad[0], *PROMPTS[:3], bad[1], *PROMPTS[3:6], bad[2], *PROMPTS[6:]]
    ids = [100, 0, 1, 2, 101, 3, 4, 5, 102, 6, 7]
    for _ in range(2):  # the second time blocks that held NaN are used again
        results = engine.generate(mixed, [params[i % 8] for i in ids], ids)
        engine.scheduler.check_integrity()
        assert [r for r in results if r.sample_id < 100] == expected
        failed = [r for r in results if r.sample_id >= 100]
        assert all(r.finish_reason == "error" and r.tokens == r.logprobs == () for r in failed) and len(failed) == 3
    assert engine.free_blocks == engine.options.num_blocks
