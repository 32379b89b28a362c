"""Both cache layouts hold the same thing, and the path without CPU kernels gives the same samples."""

from __future__ import annotations

import pytest
import torch
from testkit.gen_models import random_weights, tiny_spec
from testkit.moves import move_sequences

from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.cpu.forward import LaneKVCache
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("heads", [slice(None), slice(1, 2), slice(0, 3)], ids=str)
def test_blocks_are_read_as_they_were_written(lanes, heads, dtype):
    cache = (LaneKVCache if lanes else KVCache)(3, 7, 4, 3, 6, dtype=dtype, device=torch.device("cpu"))
    kv = torch.randn(2, 2, 3, 4, 3, 6).to(dtype)[..., heads, :]
    cache.write_blocks([5, 0], kv, heads)
    assert torch.equal(cache.read_blocks([5, 0], heads), kv)
    whole = cache.read_blocks(range(7))
    assert torch.equal(whole[[5, 0]][..., heads, :], kv)
    assert whole.count_nonzero() == kv.count_nonzero(), "something else was written"
    head = 6 * 16 + 4 * 16 if lanes else 2 * 4 * 6  # numbers of one block and head; lanes are padded to 16
    assert cache.keys.nbytes + cache.values.nbytes == 3 * 7 * 3 * head * kv.element_size()


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
    assert type(ours._cache) is LaneKVCache and type(torch_engine._cache) is KVCache
    results = torch_engine.generate(prompts, params)
    assert move_sequences(ours, torch_engine, [s.sample_id for s in ours.unfinished()]) == []
    while torch_engine.has_unfinished():
        moved += torch_engine.step()
    for other in (results, sorted(moved, key=lambda r: r.sample_id)):
        for a, b in zip(expected, other):
            assert a.tokens == b.tokens
            assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-4
