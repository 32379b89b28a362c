"""The engine's contract: ends, weights and memory that come and go, and the same bits however it comes to a sample."""

import math
import weakref
from dataclasses import replace

import pytest
from testkit.gen_models import GREEDY, PROMPTS, add_all, engine_of, random_weights, run_out, tiny_spec

from rlhfuse.decisions.migration import UnfinishedSample
from rlhfuse.gen.engine import SamplingParams


def test_stop_token_is_kept_and_min_tokens_delays_it():
    """Up to the last token that there may be."""
    engine, params = engine_of(), SamplingParams(max_tokens=12, ignore_eos=True)
    free = engine.generate([[9, 10]], params)[0].tokens
    places = [at for at, token in enumerate(free) if token not in free[:at]]
    assert places[-1] == 11, "the example needs an end that comes once"
    for at in places:
        stops = replace(params, stop_token_ids=(free[at],))
        for least in (0, at):
            result = engine.generate([[9, 10]], replace(stops, min_tokens=least))[0]
            assert result.tokens == free[: at + 1] and result.finish_reason == "stop"
        result = engine.generate([[9, 10]], replace(stops, min_tokens=at + 1))[0]
        assert result.tokens[:at] == free[:at] and len(result.tokens) > at and free[at] not in result.tokens[: at + 1]


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
    results = add_all(engine, [[9, 10]], GREEDY, steps=3)
    with pytest.raises(ValueError, match="embedding.word_embeddings.weight"):
        engine.load_weights({"decoder.final_layernorm.weight": engine.weights.final_norm})
    assert run_out(engine, results=results) == [before]


def test_states_and_counts_of_steps():
    engine = engine_of()
    engine.add(3, [9] * 20, GREEDY)
    for prefill, context in ((20, 20), (0, 21)):
        engine.step()
        ran, state = engine.last_step, engine.unfinished()[0]
        assert (ran.batch, ran.prefill_tokens, ran.context_tokens) == (1, prefill, context)
        assert state == UnfinishedSample(3, 0, context + 1, context)
        assert len(engine.scheduler.running[0].block_table) == 2
    engine.abort(3)
    assert not engine.has_unfinished() and engine.free_blocks == engine.options.num_blocks and engine.step() == []


@pytest.mark.parametrize("options", [dict(), dict(keep_memory=True), dict(keep_memory=True, kernels="torch")], ids=str)
def test_loaded_weights_give_the_new_models_tokens_and_are_read_in_place(options):
    """The blocks of the same prompt under the old weights are still there where memory is kept, and not found."""
    values, prompt = random_weights(tiny_spec(), seed=5), [9] * 40
    weights = random_weights(tiny_spec())
    engine, in_place = engine_of(**options), engine_of(weights=weights, **options)
    old = engine.generate([prompt], GREEDY)
    assert in_place.generate([prompt], GREEDY) == old
    if options:
        engine.pause()
        engine.release_weights()  # allowed: it is paused
    engine.load_weights(values)
    engine.resume()
    for name, value in values.items():
        weights[name].copy_(value)
    in_place.load_weights(weights)
    new = engine.generate([prompt], GREEDY)
    fresh = engine_of(weights=values, **options).generate([prompt], GREEDY)
    assert new == in_place.generate([prompt], GREEDY) == fresh != old and engine.scheduler.reused_tokens == 0


def test_greedy_samples_are_spared_log_probabilities_that_nobody_asked_for():
    engine = engine_of()
    asked, other = engine.generate(PROMPTS[:2], [GREEDY, replace(GREEDY, temperature=1.0)])
    spared, same = engine.generate(PROMPTS[:2], [replace(GREEDY, logprobs=False), replace(GREEDY, temperature=1.0)])
    assert spared.tokens == asked.tokens and all(map(math.isnan, spared.logprobs)) and same == other
    assert not any(map(math.isnan, asked.logprobs))


def test_greedy_takes_top_k_and_top_p_and_they_change_nothing():
    narrow = replace(GREEDY, top_k=3, top_p=0.4)
    assert engine_of().generate(PROMPTS, GREEDY) == engine_of().generate(PROMPTS, [narrow] * 8)
