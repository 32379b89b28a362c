"""An engine whose memory stays over the iterations of a run: decode steps are recorded once."""

import pytest
import torch
from testkit import triton_interpreter  # noqa: F401
from testkit.gen_models import PROMPTS, engine_of, random_weights, tiny_spec
from testkit.moves import move_sequences
from testkit.recorded_decode import WIDE, Repeater, torch_engine

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

NINE = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.mark.parametrize("keep, recorded", [(True, 2), (False, 6)])
def test_nothing_is_recorded_twice_where_memory_is_kept(keep, recorded):
    """Three iterations: new values in the same weights, resume, samples, pause. A new engine draws the same."""
    repeater, weights = Repeater(), random_weights(WIDE)
    engine = torch_engine(repeater, weights=weights, keep_memory=keep)
    engine.pause()
    shapes, caches = [], set()
    for iteration in range(3):
        values = random_weights(WIDE, seed=iteration)
        for name, tensor in weights.items():
            tensor.copy_(values[name])
        engine.load_weights(weights)
        engine.resume()
        caches.add(engine._cache.keys.data_ptr() if keep else iteration)
        plain = torch_engine(weights=values, run_ahead=False)
        for count in (8, 3):  # each a shape of its own
            assert engine.generate(PROMPTS[:count], NINE) == plain.generate(PROMPTS[:count], NINE)
        engine.pause()
        shapes.append(engine.forward.recorded_shapes)
    assert repeater.recorded == shapes[-1] == recorded
    assert shapes == ([2, 2, 2] if keep else [2, 4, 6])
    assert repeater.released == (0 if keep else 3) and len(caches) == (1 if keep else 3)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_paused_engine_that_keeps_its_memory_is_a_paused_engine(kernels):
    source, paused, dropped = (engine_of(WIDE, kernels=kernels, keep_memory=keep) for keep in (False, True, False))
    source.add(0, PROMPTS[2], NINE)
    for engine in (paused, dropped):
        source.step()
        assert engine.cache_bytes > 0
        engine.add(1, PROMPTS[3], NINE)
        engine.step()
        engine.pause()
        engine.pause()  # nothing is left to do
        with pytest.raises(RuntimeError, match="the engine is paused; call resume"):
            engine.step()
        with source.export_sequences([0]) as transfer:
            assert transfer.manifest.num_blocks  # with keys and values, for which a paused engine has no use
            with engine.import_sequences(transfer.manifest) as transaction:
                assert transaction.recomputed == [0] and transaction.missing_blocks == []
        assert (
            all(sample.kv_tokens == 0 for sample in engine.unfinished())
            and engine.free_blocks == engine.options.num_blocks
        )
        assert move_sequences(engine, source, [0]) == [0]  # leaves as tokens
        assert engine.free_blocks == 200
        engine.scheduler.check_integrity()
    assert paused.cache_bytes > 0 and dropped.cache_bytes == 0


def test_an_engine_without_weights_takes_its_cache_when_it_begins():
    engine = Engine(tiny_spec(), None, EngineOptions(num_blocks=8, keep_memory=True), dtype=torch.float32)
    assert engine.cache_bytes == 0
    engine.load_weights(random_weights(tiny_spec()))
    engine.resume()
    cache = engine._cache
    engine.pause()
    engine.resume()
    assert engine._cache is cache and engine.cache_bytes == cache.keys.nbytes + cache.values.nbytes
