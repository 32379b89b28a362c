"""Both cache layouts hold the same thing, and the path without CPU kernels gives the same samples."""

from __future__ import annotations

import pytest
import torch
from gen_models import random_weights, tiny_spec

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.kv_cache import KVCache


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_read_returns_what_was_written(lanes, tokens):
    cache = KVCache(3, 7, 4, 2, 6, lanes=lanes, dtype=torch.float32, device=torch.device("cpu"))
    kv = torch.randn(2, 3, tokens, 2, 6)
    table = [5, 0, 3]
    cache.write(table, kv)
    assert torch.equal(cache.read(table, tokens), kv)
    head = 6 * 16 + 4 * 16 if lanes else 2 * 4 * 6  # numbers of one block and group; lanes are padded to 16
    assert cache.bytes == 3 * 7 * 2 * head * 4
    written = [b for b in range(7) if cache.keys[:, b].any()]
    assert sorted(written) == sorted(table[: -(-tokens // 4)])


@pytest.mark.parametrize("changes", [dict(), dict(qk_norm=True, qkv_bias=True)])
def test_torch_path_equals_cpu_kernels(prompts, changes):
    """The path that CUDA takes, run here on CPU: same tokens, close log-probabilities, and KV that can move over."""
    spec = tiny_spec(**changes)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ours = Engine(spec, random_weights(spec), EngineOptions(num_blocks=60))
    expected = ours.generate(prompts, params)
    for i, prompt in enumerate(prompts):
        ours.add(i, prompt, params)
    moved = [r for _ in range(9) for r in ours.step()]
    options = EngineOptions(num_blocks=60, max_batched_tokens=50, kernels="torch")
    torch_engine = Engine(spec, random_weights(spec), options)
    assert not torch_engine._cache.lanes
    results = torch_engine.generate(prompts, params)
    assert torch_engine.import_sequences(ours.export_sequences([s.sample_id for s in ours.unfinished()])) == []
    while torch_engine.has_unfinished():
        moved += torch_engine.step()
    for other in (results, sorted(moved, key=lambda r: r.sample_id)):
        for a, b in zip(expected, other):
            assert a.tokens == b.tokens
            assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-4
