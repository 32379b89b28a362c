"""Both cache layouts hold the same thing, and the path without CPU kernels gives the same samples."""

import pytest
import torch
from testkit.gen_models import PROMPTS, add_all, assert_near, engine_of, run_out, tiny_spec
from testkit.moves import move_sequences

from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.cpu.forward import LaneKVCache
from rlhfuse.gen.engine import SamplingParams


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
def test_torch_path_equals_cpu_kernels(changes):
    """The path that CUDA takes, run here on CPU: same tokens, close log-probabilities after a move over to it."""
    spec, params = tiny_spec(**changes), SamplingParams(max_tokens=24, ignore_eos=True)
    ours = engine_of(spec)
    expected = ours.generate(PROMPTS, params)
    moved = add_all(ours, PROMPTS, params, steps=9)
    torch_engine = engine_of(spec, max_batched_tokens=50, kernels="torch")
    assert type(ours._cache) is LaneKVCache and type(torch_engine._cache) is KVCache
    assert move_sequences(ours, torch_engine, [s.sample_id for s in ours.unfinished()]) == []
    assert_near(run_out(ours, torch_engine, results=moved), expected, 1e-4)
