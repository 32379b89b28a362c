"""The engine's contract: ends, weights and memory that come and go, and the same bits however it comes to a sample."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from testkit.gen_models import GREEDY, PROMPTS, add_all, engine_of, random_weights, run_out, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import EngineOptions, SamplingParams

PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, seed=s, max_tokens=40, ignore_eos=True)
    for s, (t, k, p) in enumerate([(1, 0, 1), (0, 0, 1), (0.7, 20, 1), (1, 0, 0.9)] * 2)
]


@pytest.fixture(scope="module")
def alone():
    engine = engine_of()
    return [engine.generate([p], params, [i])[0] for i, (p, params) in enumerate(zip(PROMPTS, PARAMS))]


def test_max_tokens_end_with_length_up_to_the_whole_context():
    for prompt in ([9, 10], [9] * (256 - 12)):
        result = engine_of().generate([prompt], GREEDY)[0]
        assert result.finish_reason == "length" and len(result.tokens) == len(result.logprobs) == 12


def test_stop_token_is_kept_and_min_tokens_delays_it():
    engine = engine_of()
    free = engine.generate([[9, 10]], GREEDY)[0].tokens
    at = next(i for i, t in enumerate(free) if i >= 2 and t not in free[:i])
    stops = replace(GREEDY, stop_token_ids=(free[at],))
    for least in (0, at):
        result = engine.generate([[9, 10]], replace(stops, min_tokens=least))[0]
        assert result.tokens == free[: at + 1] and result.finish_reason == "stop"
    result = engine.generate([[9, 10]], replace(stops, min_tokens=at + 2))[0]
    assert free[at] not in result.tokens[: at + 1] and len(result.tokens) > at + 1


def test_stop_at_exactly_max_tokens():
    engine, params = engine_of(), SamplingParams(max_tokens=12, ignore_eos=True)
    free = engine.generate([[9, 10]], params)[0].tokens
    assert free[-1] not in free[:-1], "the example needs an end that comes once"
    ends = replace(params, stop_token_ids=(free[-1],))
    result = engine.generate([[9, 10]], replace(ends, min_tokens=12))[0]
    assert result.tokens[:11] == free[:11] and len(result.tokens) == 12
    result = engine.generate([[9, 10]], replace(ends, min_tokens=11))[0]
    assert result.tokens == free and result.finish_reason == "stop"


def test_eos_of_the_spec_ends_unless_ignored():
    engine, params = engine_of(tiny_spec(eos_token_ids=tuple(range(100)))), SamplingParams(max_tokens=60)
    result = engine.generate([[200]], params)[0]
    assert result.finish_reason == "stop" and result.tokens[-1] < 100 and min(result.tokens[:-1], default=100) >= 100
    assert len(engine.generate([[200]], replace(params, ignore_eos=True))[0].tokens) == 60


def test_weights_and_cache_go_and_come():
    """A paused engine without weights holds nothing that the owner of the weights wants to give back."""
    weights = random_weights(tiny_spec())
    engine = engine_of(weights=weights)
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
    engine.load_weights(random_weights(tiny_spec()))
    assert engine.generate([[9, 10]], GREEDY)[0] == before


def test_samples_over_a_pause(alone):
    engine = engine_of()
    results = add_all(engine, PROMPTS, PARAMS, steps=9)
    engine.pause()
    assert engine._cache is None and all(s.waiting and not s.kv_tokens for s in engine.unfinished())
    with pytest.raises(RuntimeError, match="resume"):
        engine.step()
    engine.resume()
    results += [result for _ in range(9) for result in engine.step()]
    with pytest.raises(ValueError, match="embedding.word_embeddings.weight"):
        engine.load_weights({"decoder.final_layernorm.weight": engine.runner.weights.final_norm})
    assert run_out(engine, results=results) == alone


def test_states_and_counts_of_steps():
    engine = engine_of()
    engine.add(3, [9] * 20, GREEDY)
    for prefill, context in ((20, 20), (0, 21)):
        engine.step()
        ran, state = engine.last_step, engine.unfinished()[0]
        assert (ran.batch, ran.prefill_tokens, ran.context_tokens) == (1, prefill, context)
        facts = state.sample_id, state.kv_tokens, state.total_tokens, state.blocks, state.waiting
        assert facts == (3, context, context + 1, 2, False)
    engine.abort(3)
    assert not engine.has_unfinished() and engine.free_blocks == engine.options.num_blocks and engine.step() == []


def test_loaded_weights_give_the_new_models_tokens_and_are_read_in_place():
    values, prompt = random_weights(tiny_spec(), seed=5), [9] * 40
    weights = random_weights(tiny_spec())
    engine, in_place = engine_of(), engine_of(weights=weights)
    old = engine.generate([prompt], GREEDY)
    assert in_place.generate([prompt], GREEDY) == old
    engine.load_weights(values)
    for name, value in values.items():
        weights[name].copy_(value)
    in_place.load_weights(weights)
    new = engine.generate([prompt], GREEDY)  # the known prefix of the old weights must not be used
    assert new == in_place.generate([prompt], GREEDY) == engine_of(weights=values).generate([prompt], GREEDY) != old


def test_wrong_weights_and_kernels_are_named():
    weights = random_weights(tiny_spec())
    weights["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(InputError, match="decoder.layers.1.mlp.linear_fc2.weight"):
        engine_of(weights=weights)
    with pytest.raises(InputError, match="dtype"):
        engine_of(dtype=torch.float16)
    with pytest.raises(InputError, match="kernels='cuda' is unknown"):
        EngineOptions(kernels="cuda")
    with pytest.raises(InputError, match="attention='flash' is unknown; use one of auto, flashinfer, triton"):
        EngineOptions(attention="flash")


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_batched_tokens=7),
        dict(max_batched_tokens=1),
        dict(max_sequences=3),
        dict(block_tokens=16, num_blocks=9),  # one long sample fills it: much preemption
        dict(block_tokens=16, num_blocks=14, max_batched_tokens=24),
    ],
    ids=str,
)
def test_batched_chunked_preempted_equal_alone(alone, options):
    engine = engine_of(**options)
    assert engine.generate(PROMPTS, PARAMS) == alone
    add_all(engine, PROMPTS, PARAMS)  # now with every prefix known
    assert run_out(engine) == alone


def test_failure_in_a_step_loses_no_token(alone, monkeypatch):
    engine = engine_of()
    results = add_all(engine, PROMPTS, PARAMS, steps=5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert run_out(engine, results=results) == alone


def test_draws_depend_on_seed_and_sample_alone():
    """Several seeds in one batch, in any order and company: the same draws; another seed or sample id: others."""
    engine = engine_of()
    params = [SamplingParams(seed=seed, max_tokens=16, ignore_eos=True) for seed in (3, 3, 4, -1, 2**70)]
    together = engine.generate([PROMPTS[4]] * 5, params, [0, 1, 2, 3, 4])
    assert len({r.tokens for r in together}) == 5
    order = [3, 1, 4, 0, 2]
    assert engine.generate([PROMPTS[4]] * 5, [params[i] for i in order], order) == [together[i] for i in order]
    assert engine.generate([PROMPTS[4]], params[1], [1]) == [together[1]]
    assert engine.generate([PROMPTS[4]], replace(params[1], seed=9), [1])[0].tokens != together[1].tokens


def test_greedy_takes_top_k_and_top_p_and_they_change_nothing():
    narrow = replace(GREEDY, top_k=3, top_p=0.4)
    assert engine_of().generate(PROMPTS, GREEDY) == engine_of().generate(PROMPTS, [narrow] * 8)


def test_bfloat16_takes_half_the_bytes():
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        cache = engine_of(dtype=dtype, num_blocks=50)._cache
        assert cache.keys.nbytes + cache.values.nbytes == 50 * 16 * tiny_spec().kv_bytes_per_token(size)
