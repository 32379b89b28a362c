"""The engine's contract: ends, weights and memory that come and go, and the same bits however it comes to a sample."""

import math
import weakref
from dataclasses import replace

import pytest
from testkit.gen_models import GREEDY, PROMPTS, add_all, engine_of, random_weights, run_out, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import SamplingParams
from rlhfuse.tasks.migration import UnfinishedSample


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


def test_what_other_engines_have_by_default():
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


@pytest.mark.parametrize(
    "name, value", [("top_k", 2**63), ("temperature", 10**400), ("stop", [5]), ("max_tokens", None)]
)
def test_values_that_no_step_could_take(name, value):
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-38, 1e-42, 1e-45, 5e-324])
def test_next_to_no_temperature_is_greedy(temperature, kernels):
    engine = engine_of(kernels=kernels)
    cold = engine.generate(PROMPTS, replace(GREEDY, temperature=temperature))
    assert [one.tokens for one in cold] == [one.tokens for one in engine.generate(PROMPTS, GREEDY)]
    assert all(logprob == 0 for one in cold for logprob in one.logprobs)


@pytest.mark.parametrize("moment", [0, 1, 5])
@pytest.mark.parametrize("place", ["schedule", "complete", "_preempt"])
def test_an_interrupted_engine_serves_on(monkeypatch, moment, place):
    """Wherever Ctrl-C meets it: the samples are gone, and later ones get what they always get."""
    engine, counts = engine_of(num_blocks=12), [0]
    want = engine.generate(PROMPTS, GREEDY)
    method = getattr(engine.scheduler, place)

    def interrupted(*given):
        counts[0] += 1
        done = method(*given)
        if counts[0] == moment + 1:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(engine.scheduler, place, interrupted)
    try:
        engine.generate(PROMPTS, GREEDY)
    except KeyboardInterrupt:
        assert not engine.samples and not engine.has_unfinished()
    monkeypatch.undo()  # preemptions may be fewer than the moment's number
    assert counts[0] > moment or place == "_preempt"
    engine.scheduler.check_integrity()
    assert engine.generate(PROMPTS, GREEDY) == want


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_memory_is_of_the_samples_and_not_of_the_longest_context(kernels):
    """Tables of 4,194,304 positions would take 2 GB."""
    engine = engine_of(tiny_spec(context=1 << 40), kernels=kernels)
    assert engine.generate(PROMPTS, GREEDY) == engine_of(kernels=kernels).generate(PROMPTS, GREEDY)
