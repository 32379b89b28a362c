"""The engine's CUDA attention step, run on the CPU: rows cache and torch attention give the kernels' tokens."""

from __future__ import annotations

import torch
from tiny import write_checkpoint

from rlhfuse.gen import model_runner
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.kv_cache import KVCache


class RowsCache(KVCache):
    """The cache as it lies on CUDA, in host memory."""

    def __init__(self, layers, num_blocks, block_tokens, kv_heads, head_dim, *, dtype, device) -> None:
        super().__init__(layers, 1, 1, kv_heads, head_dim, dtype=dtype, device=device)
        self.lanes, self.block_tokens = False, block_tokens
        rows = (layers, num_blocks, block_tokens, kv_heads, head_dim)
        self.keys, self.values = torch.zeros(rows, dtype=dtype), torch.zeros(rows, dtype=dtype)


def test_the_cuda_step_gives_the_cpu_kernels_tokens(tmp_path, monkeypatch):
    for model_type in ("llama", "qwen3"):
        model = write_checkpoint(tmp_path / model_type, model_type=model_type)
        options = EngineOptions(num_blocks=24, block_tokens=4, max_sequences=4, max_batched_tokens=24)
        prompts = [list(range(3, 3 + n)) for n in (1, 9, 4, 17, 2)]
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)
        wanted = Engine.from_pretrained(model, options).generate(prompts, params)
        with monkeypatch.context() as patch:
            patch.setattr(model_runner, "_CpuStep", model_runner._DeviceStep)
            patch.setattr("rlhfuse.gen.engine.KVCache", RowsCache)
            engine = Engine.from_pretrained(model, options)
            for sample, prompt in enumerate(prompts):
                engine.add(sample, prompt, params)
            results = engine.step() + engine.step() + engine.step()
            moved = engine.export_sequences([state.sample_id for state in engine.unfinished()])  # read and write, too
            engine.import_sequences(moved)
            while engine.has_unfinished():
                results += engine.step()
        found = {result.sample_id: result for result in results}
        assert [found[i].tokens for i in range(len(prompts))] == [one.tokens for one in wanted]
        for i, one in enumerate(wanted):
            torch.testing.assert_close(torch.tensor(found[i].logprobs), torch.tensor(one.logprobs), atol=1e-4, rtol=0)
