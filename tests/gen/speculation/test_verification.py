"""Guesses in the engine: tokens, log-probabilities and ends are those without; steps are fewer, blocks come back."""

import functools
import random

import torch
from testkit.gen_models import TINY, add_all, engine_of, random_weights
from testkit.scripted_guesses import ScriptedGuesser

from rlhfuse.gen.engine import Engine, GenerationResult, SamplingParams

PROMPTS = [[9, 10, 11], [12], list(range(20, 60)), [300, 299], [9, 10, 11]]


def make(**options) -> Engine:
    return engine_of(**({"num_blocks": 60} | options))


def serve(engine: Engine, params: SamplingParams) -> tuple[list[GenerationResult], int, int]:
    """Results in order, steps, guesses that were right."""
    add_all(engine, PROMPTS, params)
    results, steps, right = {}, 0, 0
    while engine.has_unfinished():
        results |= {result.sample_id: result for result in engine.step()}
        engine.scheduler.check_integrity()
        steps += 1
        right += engine.last_step.accepted_tokens
        assert engine.last_step.accepted_tokens <= engine.last_step.guessed_tokens
    assert engine.free_blocks == engine.options.num_blocks
    return [results[i] for i in range(len(PROMPTS))], steps, right


@functools.cache
def plain(params: SamplingParams) -> tuple[list[GenerationResult], int]:
    """The same results without guesses, and their steps."""
    return serve(make(draft_rows=0), params)[:2]


def scripted(kind: str, params: SamplingParams, draft_rows: int = 16, **options) -> Engine:
    """An engine whose guesses are by rule, from what the samples will draw."""
    expected, _ = plain(params)
    engine = make(draft_rows=draft_rows, **options)
    engine.loop.guesser = ScriptedGuesser(TINY.vocab, draft_rows, kind, lambda i: expected[i].tokens, random.Random(0))
    return engine


def test_guesses_take_free_blocks_only_and_give_them_back():
    """Room for what is drawn and one block more: guesses are cut to it, and no sample is preempted for them."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    blocks = sum(-(-(len(prompt) + 39) // 4) for prompt in PROMPTS) + 1
    sizes = dict(num_blocks=blocks, block_tokens=4, max_batched_tokens=64)
    expected, steps, _ = serve(make(draft_rows=0, **sizes), params)
    found, fewer, right = serve(scripted("right", params, **sizes), params)
    assert found == expected and fewer < steps / 1.5 and right > 50


def test_rows_of_guesses_count_against_the_tokens_of_a_step():
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = scripted("right", params, max_batched_tokens=8)
    add_all(engine, PROMPTS, params)
    most = 0
    while engine.has_unfinished():
        engine.step()
        ran = engine.last_step
        most = max(most, ran.batch + ran.guessed_tokens if not ran.prefill_tokens else 0)
        assert ran.prefill_tokens + ran.batch + ran.guessed_tokens <= 8 + len(PROMPTS)
    assert most == 8


def test_wrong_guesses_never_enter_the_prefix_index():
    """Another sample whose prompt is what was guessed, not what was drawn, finds only what was drawn."""
    params = SamplingParams(max_tokens=33, ignore_eos=True, seed=1)
    expected = make(draft_rows=0).generate([PROMPTS[0]], params)[0]
    engine = scripted("wrong", params, block_tokens=2)
    engine.generate([PROMPTS[0]], params)
    for known in (4, 9, 20):
        engine.loop.guesser = ScriptedGuesser(TINY.vocab, 16, "random", lambda _: (), random.Random(0))
        wrong = [(token + 1) % TINY.vocab for token in expected.tokens[known:]]
        guessed = [*PROMPTS[0], *expected.tokens[:known], *wrong]
        plain = make(draft_rows=0).generate([guessed], params, [77])[0]
        assert engine.generate([guessed], params, [77])[0] == plain
        assert engine.last_step.reused_tokens == 0 or engine.last_step.reused_tokens <= len(PROMPTS[0]) + known


def test_a_sample_whose_logits_are_not_finite_behind_a_wrong_guess_goes_on():
    """A guess whose embedding is infinite gives no number; nobody looks at what follows a guess that was not drawn."""
    weights = random_weights(TINY)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=2)
    expected = engine_of(weights=weights, draft_rows=0).generate(PROMPTS, params)
    unused = next(t for t in range(TINY.vocab) if all(t not in (*r.tokens, *r.prompt_tokens) for r in expected))
    weights["embedding.word_embeddings.weight"][unused] = torch.inf
    engine = engine_of(weights=weights, draft_rows=16)
    engine.loop.guesser = ScriptedGuesser(TINY.vocab, 16, "right", lambda _: (unused,) * 99, random.Random(0))
    assert engine.generate(PROMPTS, params) == expected


def test_history_of_earlier_iterations_is_a_cache():
    """With it there are fewer steps, without it the same bits: as after a restart."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=5)
    knows, fresh = make(draft_rows=16), make(draft_rows=16)
    expected, steps = plain(params)
    knows.learn([(r.prompt_tokens, r.tokens) for r in expected])
    found, fewer, _ = serve(knows, params)
    assert found == expected == serve(fresh, params)[0]
    assert fewer < 0.5 * steps


def test_guesses_that_are_slower_by_the_engines_clock_are_turned_off():
    """Steps with guesses take five times as long, which right ones do not make up for."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=6)
    expected, steps = plain(params)
    for slow, least, most in ((5.0, 4, 20), (1.0, 25, steps)):
        engine, now = make(), [0.0]
        guess = ScriptedGuesser(TINY.vocab, 16, "right", lambda i: expected[i].tokens[:-1], random.Random(0))
        guesser = engine.loop.guesser
        assert guesser

        def propose(*asked, guess=guess, guesser=guesser):
            guesser.searched = True
            return [tokens[:1] for tokens in guess.propose(*asked)]

        guesser.propose = propose
        engine.loop._now = lambda now=now: now[0]
        launch, guessed = engine.forward.launch, []

        def timed(batch, *rest, launch=launch, slow=slow, now=now, guessed=guessed):
            guessed.append(batch.guesses is not None)
            now[0] += slow if guessed[-1] else 1.0
            return launch(batch, *rest)

        engine.forward.launch = timed
        guesser.told = guess.told
        assert serve(engine, params)[0] == expected
        assert least <= sum(guessed) <= most, (slow, sum(guessed))


def test_an_engine_that_never_guesses_right_is_as_fast_in_steps():
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=6)
    assert serve(scripted("wrong", params), params)[:2] == plain(params)
