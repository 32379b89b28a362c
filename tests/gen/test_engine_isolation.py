"""What one sample asks for or suffers does not touch the others; contradictions are refused."""

from __future__ import annotations

import math

import pytest
import torch
from testkit.gen_models import random_weights, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams


@pytest.mark.parametrize("options", [dict(), dict(max_batched_tokens=9), dict(num_blocks=14)], ids=str)
def test_logits_that_are_not_finite_fail_one_sample_and_change_no_other(prompts, options):
    spec = tiny_spec()
    weights = random_weights(spec)
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, top_p=(1, 0.9)[i % 2]) for i in range(8)]
    expected = Engine(spec, weights, EngineOptions(num_blocks=200)).generate(prompts, params)
    met = {token for result in expected for token in result.prompt_tokens + result.tokens}
    poison = next(token for token in range(10, spec.vocab) if token not in met)  # only the bad samples meet it
    weights["embedding.word_embeddings.weight"][poison] = math.nan
    engine = Engine(spec, weights, EngineOptions(**(dict(num_blocks=200) | options)))
    bad = [[9] * 3 + [poison] + [9] * 30, [poison], prompts[5][:40] + [poison]]  # the last shares two blocks
    mixed = [bad[0], *prompts[:3], bad[1], *prompts[3:6], bad[2], *prompts[6:]]
    ids = [100, 0, 1, 2, 101, 3, 4, 5, 102, 6, 7]
    for _ in range(2):  # the second time blocks that held NaN are used again
        results = engine.generate(mixed, [params[i % 8] for i in ids], ids)
        engine.check_integrity()
        assert [r for r in results if r.sample_id < 100] == expected
        for result in results:
            if result.sample_id >= 100:
                assert result.finish_reason == "error" and result.tokens == result.logprobs == ()
    assert engine.free_blocks == engine.options.num_blocks


def test_a_sample_that_fails_on_its_way_keeps_what_it_drew():
    spec = tiny_spec()
    weights = random_weights(spec)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    whole = Engine(spec, weights, EngineOptions(num_blocks=20)).generate([[9, 10]], params)[0]
    at = next(i for i, t in enumerate(whole.tokens) if i >= 4 and t not in (9, 10, *whole.tokens[:i]))
    weights["embedding.word_embeddings.weight"][whole.tokens[at]] = math.nan
    result = Engine(spec, weights, EngineOptions(num_blocks=20)).generate([[9, 10]], params)[0]
    assert result.finish_reason == "error" and result.tokens == whole.tokens[: at + 1]
    assert result.logprobs == whole.logprobs[: at + 1]


def test_draws_depend_on_seed_and_sample_alone(make_engine, prompts):
    """Several seeds in one batch, in any order and company: the same draws; another seed or sample id: others."""
    engine = make_engine()
    params = [SamplingParams(seed=seed, max_tokens=16, ignore_eos=True) for seed in (3, 3, 4, -1, 2**70)]
    together = engine.generate([prompts[4]] * 5, params, [0, 1, 2, 3, 4])
    assert len({r.tokens for r in together}) == 5
    order = [3, 1, 4, 0, 2]
    again = engine.generate([prompts[4]] * 5, [params[i] for i in order], order)
    assert again == [together[i] for i in order]
    alone = engine.generate([prompts[4]], params[1], [1])
    assert alone == [together[1]]
    other = engine.generate([prompts[4]], SamplingParams(seed=9, max_tokens=16, ignore_eos=True), [1])
    assert other[0].tokens != together[1].tokens


def test_greedy_takes_top_k_and_top_p_and_they_change_nothing(make_engine, prompts):
    plain = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    narrow = SamplingParams(temperature=0, top_k=3, top_p=0.4, max_tokens=10, ignore_eos=True)
    assert make_engine().generate(prompts, plain) == make_engine().generate(prompts, narrow)


def test_min_tokens_with_top_k_one_goes_past_a_likely_end(make_engine):
    """The end token is ruled out before top-k chooses: else nothing would be left to draw."""
    engine = make_engine()
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    first = engine.generate([[9, 10]], greedy)[0].tokens[0]
    params = SamplingParams(top_k=1, max_tokens=6, min_tokens=6, ignore_eos=True, stop_token_ids=(first,))
    result = engine.generate([[9, 10]], params)[0]
    assert result.finish_reason in ("stop", "length") and len(result.tokens) == 6
    assert first not in result.tokens[:5]


def test_stop_at_exactly_min_tokens_and_at_max_tokens(make_engine):
    engine = make_engine()
    free = engine.generate([[9, 10]], SamplingParams(max_tokens=12, ignore_eos=True))[0].tokens
    assert free[-1] not in free[:-1], "the example needs an end that comes once"
    last = SamplingParams(max_tokens=12, min_tokens=12, ignore_eos=True, stop_token_ids=(free[-1],))
    result = engine.generate([[9, 10]], last)[0]
    assert result.tokens == free[:11] + result.tokens[11:] and len(result.tokens) == 12
    early = SamplingParams(max_tokens=12, min_tokens=11, ignore_eos=True, stop_token_ids=(free[-1],))
    assert engine.generate([[9, 10]], early)[0].tokens == free
    assert engine.generate([[9, 10]], early)[0].finish_reason == "stop"


def test_one_params_for_all_equals_one_each(make_engine, prompts):
    params = SamplingParams(max_tokens=8, temperature=0.8)
    assert make_engine().generate(prompts, params) == make_engine().generate(prompts, [params] * len(prompts))
    with pytest.raises(InputError, match="8 prompts, 2 params"):
        make_engine().generate(prompts, [params] * 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(stop_token_ids=(301,)), r"stop token 301 is not an id in \[0, 301\)"),
        (dict(stop_token_ids=tuple(range(301)), min_tokens=1), "every token ends it"),
    ],
)
def test_end_tokens_that_cannot_be_are_refused_by_the_engine(make_engine, bad, message):
    engine = make_engine()
    with pytest.raises(InputError, match=message):
        engine.add(0, [1], SamplingParams(**bad))
    assert not engine.has_unfinished()


def test_the_longest_prompt_goes_through_the_smallest_budget(make_engine, spec):
    prompt = torch.randint(8, 301, (spec.context - 4,), generator=torch.Generator().manual_seed(3)).tolist()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = make_engine(max_batched_tokens=2048).generate([prompt], params)
    assert make_engine(max_batched_tokens=5).generate([prompt], params) == expected
    assert make_engine(max_batched_tokens=1, num_blocks=16, block_tokens=16).generate([prompt], params) == expected
