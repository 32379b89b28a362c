"""The same tokens and log-probability bits, however the engine comes to run a sample."""

from __future__ import annotations

import pytest
from testkit.gen_models import random_weights, tiny_spec
from testkit.moves import import_sequences, move_sequences, through_bytes

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, seed=s, max_tokens=40, ignore_eos=True)
    for s, (t, k, p) in enumerate([(1, 0, 1), (0, 0, 1), (0.7, 20, 1), (1, 0, 0.9)] * 2)
]


@pytest.fixture
def alone(make_engine, prompts):
    engine = make_engine()
    return [engine.generate([p], params, [i])[0] for i, (p, params) in enumerate(zip(prompts, PARAMS))]


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
def test_batched_chunked_preempted_equal_alone(make_engine, prompts, alone, options):
    engine = make_engine(**options)
    assert engine.generate(prompts, PARAMS) == alone
    assert engine.generate(prompts, PARAMS) == alone  # now with every prefix known
    engine.check_integrity()
    assert engine.free_blocks == engine.options.num_blocks


def test_preemption_happens(make_engine, prompts):
    """The options above must really preempt, or that test shows nothing."""
    engine = make_engine(num_blocks=9)
    for i, (prompt, params) in enumerate(zip(prompts, PARAMS)):
        engine.add(i, prompt, params)
    preempted = 0
    while engine.has_unfinished():
        running = {s.sample_id for s in engine.unfinished() if not s.waiting}
        done = {r.sample_id for r in engine.step()}
        preempted += len(running - done - {s.sample_id for s in engine.unfinished() if not s.waiting})
        engine.check_integrity()
    assert preempted > 0


def test_samples_of_one_prompt_share_blocks(make_engine, prompts, alone):
    engine = make_engine()
    for i in range(4):
        engine.add(i, prompts[5], PARAMS[5])
    engine.step()
    # 60 tokens: three full blocks shared by all four, and a last block each.
    assert engine.options.num_blocks - engine.free_blocks == 3 + 4
    results = []
    while engine.has_unfinished():
        results += engine.step()
        engine.check_integrity()
    assert sorted(r.sample_id for r in results) == [0, 1, 2, 3]


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("steps", range(0, 44, 3))
def test_migrated_equals_alone(make_engine, prompts, alone, steps, with_kv):
    """After any number of steps, half of the samples move, through bytes and one tensor, into a busy engine."""
    source, destination = make_engine(max_batched_tokens=64), make_engine(max_batched_tokens=50)
    for i in range(8):
        (source if i < 6 else destination).add(i, prompts[i], PARAMS[i])
    results = [r for _ in range(steps) for r in source.step()]
    moving = [s.sample_id for s in source.unfinished()][::2]
    with source.export_sequences(moving, "kv" if with_kv else "tokens") as transfer:
        received = through_bytes(transfer)
        destination.step()
        recomputed = import_sequences(destination, received)
    assert set(recomputed) == {s.sample_id for s in received.manifest.sequences if not (with_kv and s.blocks)}
    for engine in (source, destination):
        while engine.has_unfinished():
            engine.check_integrity()
            results += engine.step()
    assert sorted(results, key=lambda r: r.sample_id) == alone


def test_import_without_room_recomputes(make_engine, prompts, alone):
    source, destination = make_engine(), make_engine(num_blocks=10)
    for i in range(8):
        source.add(i, prompts[i], PARAMS[i])
    results = [r for _ in range(10) for r in source.step()]
    recomputed = move_sequences(source, destination, range(8))
    assert 0 < len(recomputed) < 8
    while destination.has_unfinished():
        results += destination.step()
        destination.check_integrity()
    assert sorted(results, key=lambda r: r.sample_id) == alone


def test_pause_resume_and_same_weights(make_engine, prompts, alone):
    engine = make_engine()
    for i in range(8):
        engine.add(i, prompts[i], PARAMS[i])
    results = [r for _ in range(9) for r in engine.step()]
    engine.pause()
    assert engine._cache is None and all(s.waiting and not s.kv_tokens for s in engine.unfinished())
    with pytest.raises(RuntimeError, match="resume"):
        engine.step()
    engine.resume()
    results += [r for _ in range(9) for r in engine.step()]
    weights = dict(zip(["decoder.final_layernorm.weight"], [engine.runner.weights.final_norm]))
    with pytest.raises(ValueError, match="embedding.word_embeddings.weight"):
        engine.load_weights(weights)
    while engine.has_unfinished():
        results += engine.step()
    assert sorted(results, key=lambda r: r.sample_id) == alone


def test_failure_in_a_step_loses_no_token(make_engine, prompts, alone, monkeypatch):
    engine = make_engine()
    for i in range(8):
        engine.add(i, prompts[i], PARAMS[i])
    results = [r for _ in range(5) for r in engine.step()]
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check_integrity()
    while engine.has_unfinished():
        results += engine.step()
    assert sorted(results, key=lambda r: r.sample_id) == alone


@pytest.mark.parametrize(
    "changes",
    [dict(qk_norm=True, heads=6, kv_heads=2, head_dim=20), dict(qkv_bias=True, proj_bias=True, heads=2)],
    ids=str,
)
def test_other_shapes_equal_alone(changes, prompts):
    spec = tiny_spec(**changes)
    weights = random_weights(spec)
    one = Engine(spec, weights, EngineOptions(num_blocks=64))
    many = Engine(spec, weights, EngineOptions(num_blocks=12, max_batched_tokens=19))
    expected = [one.generate([p], PARAMS[i], [i])[0] for i, p in enumerate(prompts)]
    assert many.generate(prompts, PARAMS) == expected
