"""What holds on CPU beyond float32 on one thread.

bfloat16     log-probabilities near those of the float32 model with the same rounded weights; that its bits do not
             depend on the batch is tried by test_random_workloads.py
two threads  the same bits as one thread in a model of a few million parameters; in wider ones the GEMM library
             may divide a sum among its threads: then equal tokens, and log-probabilities within 1e-5
"""

import json
from pathlib import Path

import pytest
import torch
from testkit.gen_models import random_tokens
from testkit.tiny import write_checkpoint

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.models.hf import load_weights

LENGTHS = (1, 5, 15, 16, 17, 33, 60, 16, 90)
PARAMS = SamplingParams(max_tokens=20, seed=2, ignore_eos=True)
SHAPES = {
    "llama": dict(),
    "biased llama": dict(attention_bias=True),
    "qwen2": dict(model_type="qwen2", head_dim=64, hidden_size=128),
    "qwen3": dict(model_type="qwen3", head_dim=16),
}


@pytest.fixture(params=SHAPES)
def folder(request, tmp_path) -> Path:
    return write_checkpoint(tmp_path / "model", seed=5, **SHAPES[request.param])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_bfloat16_is_near_float32_of_the_same_weights(folder, kernels, capsys):
    """Teacher-forced: every beginning of the float32 model's samples, one greedy token of each model."""
    options = EngineOptions(num_blocks=200, kernels=kernels)
    half, full = (Engine.from_pretrained(folder, options, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    rounded = load_weights(folder, ModelSpec.from_config(folder), dtype=torch.bfloat16)
    full.load_weights({name: weight.float() for name, weight in rounded.items()})
    texts = [[*r.prompt_tokens, *r.tokens] for r in full.generate(random_tokens(LENGTHS, 8, full.spec.vocab), PARAMS)]
    beginnings = [text[:end] for text in texts for end in range(max(1, len(text) - 20), len(text))]
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    pairs = list(zip(half.generate(beginnings, greedy), full.generate(beginnings, greedy)))
    same = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs if a.tokens == b.tokens]
    with capsys.disabled():
        mean = sum(same) / len(same)
        print(f"\nbfloat16: {len(same)} of {len(pairs)} greedy tokens equal; within {max(same):.3f}, mean {mean:.4f}")
    assert len(same) > 0.9 * len(pairs)
    assert mean < 0.02 and max(same) < 0.1


PROGRAM = "import sys; from gen.cpu import test_bfloat16_and_threads as test; test.print_samples(*sys.argv[1:])"


def print_samples(threads: str, folder: str) -> None:
    """Chunks of a few hundred tokens, decode in batches, then each sample alone, as one line of JSON."""
    torch.set_num_threads(int(threads))
    engine = Engine.from_pretrained(folder, EngineOptions(num_blocks=100, max_batched_tokens=300))
    texts = random_tokens((1, 40, 200, 17, 250, 90, 33, 5, 15, 16), seed=8, vocab=engine.spec.vocab)
    params = SamplingParams(max_tokens=8, seed=2, ignore_eos=True)
    batched = engine.generate(texts, params)
    alone = [engine.generate([text], params, [i])[0] for i, text in enumerate(texts)]
    assert torch.get_num_threads() == int(threads)
    print(json.dumps([[(r.tokens, r.logprobs) for r in results] for results in (batched, alone)]))


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_threads_give_the_bits_of_one(programs, tmp_path, capsys, wide):
    """From processes of their own with so many threads; in a wide model sums may differ in their last bits."""
    sizes = dict(hidden_size=256, num_attention_heads=4, intermediate_size=688, vocab_size=512, num_hidden_layers=3)
    if wide:
        sizes = dict(hidden_size=512, num_attention_heads=8, intermediate_size=1376, vocab_size=2048)
    folder = write_checkpoint(tmp_path / "model", seed=5, head_dim=64, max_position_embeddings=512, **sizes)
    found = []
    for threads in (1, 2):
        run = programs.python("-c", PROGRAM, threads, folder, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout.splitlines()[-1]))
    (one, alone), (two, two_alone) = found
    assert one == alone
    with capsys.disabled():
        print(f"\ntwo threads: bits equal to one thread: {one == two}, batched equal alone: {two == two_alone}")
    if not wide:
        assert one == two == two_alone
    for (tokens, logprobs), (others, other_logprobs) in zip(alone, two_alone):
        assert tokens == others
        assert max(abs(a - b) for a, b in zip(logprobs, other_logprobs)) < 1e-5
