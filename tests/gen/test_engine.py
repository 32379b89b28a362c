"""The engine's contract: ends, limits, bad input, new weights."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from testkit.gen_models import random_weights, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_max_tokens_end_with_length_up_to_the_whole_context(make_engine, spec):
    for prompt in ([9, 10], [9] * (spec.context - 12)):
        result = make_engine().generate([prompt], GREEDY)[0]
        assert result.finish_reason == "length" and len(result.tokens) == len(result.logprobs) == 12


def test_stop_token_is_kept_and_min_tokens_delays_it(make_engine):
    engine = make_engine()
    free = engine.generate([[9, 10]], GREEDY)[0].tokens
    at = next(i for i, t in enumerate(free) if i >= 2 and t not in free[:i])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(free[at],))
    result = engine.generate([[9, 10]], params)[0]
    assert result.tokens == free[: at + 1] and result.finish_reason == "stop"
    late = SamplingParams(temperature=0, max_tokens=12, min_tokens=at + 2, ignore_eos=True, stop_token_ids=(free[at],))
    result = engine.generate([[9, 10]], late)[0]
    assert free[at] not in result.tokens[: at + 1] and len(result.tokens) > at + 1


def test_eos_of_the_spec_ends_unless_ignored():
    spec = tiny_spec(eos_token_ids=tuple(range(100)))
    engine = Engine(spec, random_weights(spec), EngineOptions(num_blocks=20))
    result = engine.generate([[200]], SamplingParams(max_tokens=60))[0]
    assert result.finish_reason == "stop" and result.tokens[-1] < 100 and min(result.tokens[:-1], default=100) >= 100
    ignored = SamplingParams(max_tokens=60, ignore_eos=True)
    assert len(engine.generate([[200]], ignored)[0].tokens) == 60


def test_weights_and_cache_go_and_come(spec):
    """A paused engine without weights holds nothing that the owner of the weights wants to give back."""
    weights = random_weights(spec)
    engine = Engine(spec, weights, EngineOptions(num_blocks=20))
    before = engine.generate([[9, 10]], GREEDY)[0]
    with pytest.raises(RuntimeError, match="the engine is running; call pause"):
        engine.release_weights()
    engine.pause()
    engine.release_weights()
    gone = weakref.ref(weights["decoder.final_layernorm.weight"])
    weights.clear()
    assert engine._cache is None and gone() is None
    engine.resume()
    engine.add(1, [9, 10], GREEDY)
    with pytest.raises(RuntimeError, match="no weights; call load_weights"):
        engine.step()
    engine.abort(1)
    engine.load_weights(random_weights(spec))
    assert engine.generate([[9, 10]], GREEDY)[0] == before


def test_stop_text():
    spec = tiny_spec()

    def spell(tokens: list[int]) -> str:
        return "".join(chr(97 + t % 26) for t in tokens)

    letters = Engine(spec, random_weights(spec), EngineOptions(num_blocks=20), detokenize=spell)
    free = letters.generate([[9]], SamplingParams(max_tokens=30, ignore_eos=True))[0].tokens
    text = spell(free)
    stop = text[10:13]
    result = letters.generate([[9]], SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))[0]
    assert result.finish_reason == "stop" and len(result.tokens) == text.index(stop) + 3


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty prompt"),
        ([301], GREEDY, r"token 301 is not an id in \[0, 301\)"),
        ([-1], GREEDY, "token -1"),
        ([1.5], GREEDY, "token 1.5"),
        ([1] * 245, GREEDY, "245 prompt tokens and max_tokens=12 leave the context of 256"),
        ([1] * 100, GREEDY, "raise num_blocks"),
        ([1], SamplingParams(stop=("x",)), "tokenizer"),
    ],
)
def test_bad_prompts_are_refused_and_leave_the_engine_usable(make_engine, prompt, params, message):
    engine = make_engine(num_blocks=6)
    before = engine.generate([[9, 10]], GREEDY)
    with pytest.raises(InputError, match=message):
        engine.generate([[5], prompt], params)
    assert not engine.has_unfinished()
    engine.check_integrity()
    assert engine.generate([[9, 10]], GREEDY) == before


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-1),
        dict(temperature=math.nan),
        dict(top_p=0),
        dict(top_p=1.1),
        dict(top_k=-1),
        dict(max_tokens=0),
        dict(min_tokens=5, max_tokens=4),
        dict(stop=("",)),
        dict(max_tokens=1.5),
    ],
)
def test_bad_params_are_refused(bad):
    with pytest.raises(InputError):
        SamplingParams(**bad)


def test_ids_abort_and_states(make_engine):
    engine = make_engine()
    engine.add(3, [9] * 20, GREEDY)
    with pytest.raises(InputError, match="already"):
        engine.add(3, [9], GREEDY)
    with pytest.raises(InputError, match="idle"):
        engine.generate([[9]], GREEDY)
    engine.step()
    state = engine.unfinished()[0]
    assert (state.sample_id, state.kv_tokens, state.total_tokens, state.blocks, state.waiting) == (3, 20, 21, 2, False)
    assert (engine.last_step.batch, engine.last_step.prefill_tokens, engine.last_step.context_tokens) == (1, 20, 20)
    engine.step()
    assert (engine.last_step.batch, engine.last_step.prefill_tokens, engine.last_step.context_tokens) == (1, 0, 21)
    engine.abort(3)
    with pytest.raises(InputError, match="not unfinished"):
        engine.abort(3)
    assert not engine.has_unfinished() and engine.free_blocks == engine.options.num_blocks and engine.step() == []


def test_load_weights_gives_the_new_models_tokens(make_engine, spec):
    engine, fresh = make_engine(), Engine(spec, random_weights(spec, seed=5), EngineOptions(num_blocks=200))
    prompt = [9] * 40
    old = engine.generate([prompt], GREEDY)
    engine.load_weights(random_weights(spec, seed=5))
    new = engine.generate([prompt], GREEDY)  # the known prefix of the old weights must not be used
    assert new == fresh.generate([prompt], GREEDY) and new != old


def test_weights_are_read_in_place(spec):
    weights = random_weights(spec)
    engine = Engine(spec, weights, EngineOptions(num_blocks=200))
    before = engine.generate([[9]], GREEDY)
    for name, value in random_weights(spec, seed=5).items():
        weights[name].copy_(value)
    engine.load_weights(weights)
    assert engine.generate([[9]], GREEDY) != before


def test_not_finite_numbers_fail_their_own_sample_only(spec):
    weights = random_weights(spec)
    weights["embedding.word_embeddings.weight"][50] = math.nan
    weights["output_layer.weight"] = random_weights(spec, seed=3)["output_layer.weight"]
    engine = Engine(spec, weights, EngineOptions(num_blocks=50))
    never_50 = SamplingParams(temperature=0, max_tokens=6, min_tokens=6, stop_token_ids=(50,))
    good = engine.generate([[9, 11]], never_50)[0]
    both = engine.generate([[9, 11], [9, 50, 11]], never_50)
    assert both[0] == good and good.finish_reason == "length"
    assert both[1].finish_reason == "error" and both[1].tokens == ()
    engine.check_integrity()


def test_wrong_weights_are_named(spec):
    weights = random_weights(spec)
    weights["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(InputError, match="decoder.layers.1.mlp.linear_fc2.weight"):
        Engine(spec, weights)
    with pytest.raises(InputError, match="dtype"):
        Engine(spec, random_weights(spec), dtype=torch.float16)


def test_bfloat16_on_cpu(spec):
    """Half the KV bytes, and log-probabilities near those of the float32 model with the same weights."""
    rounded = {name: w.bfloat16() for name, w in random_weights(spec).items()}
    half = Engine(spec, rounded, EngineOptions(num_blocks=50), dtype=torch.bfloat16)
    full = Engine(spec, {name: w.float() for name, w in rounded.items()}, EngineOptions(num_blocks=50))
    sizes = [engine._cache.keys.nbytes + engine._cache.values.nbytes for engine in (half, full)]
    assert sizes[0] * 2 == sizes[1] == 50 * 16 * spec.kv_bytes_per_token(4)
    a, b = half.generate([[9, 10, 11]], GREEDY)[0], full.generate([[9, 10, 11]], GREEDY)[0]
    assert a.tokens[0] == b.tokens[0] and abs(a.logprobs[0] - b.logprobs[0]) < 0.1
