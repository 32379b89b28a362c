"""What holds on CPU beyond float32 on one thread.

bfloat16     the same tokens and bits alone, batched, chunked, preempted and moved, as in float32; its
             log-probabilities are near those of the float32 model with the same rounded weights, not equal
two threads  the same bits as one thread in a model of a few million parameters; in wider ones the GEMM library
             may divide a sum among its threads: then equal tokens, and log-probabilities within 1e-5
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from testkit.engine_pair import move
from testkit.tiny import write_checkpoint

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = (1, 5, 15, 16, 17, 33, 60, 16, 90)
PARAMS = SamplingParams(max_tokens=20, seed=2, ignore_eos=True)
ROOMY = EngineOptions(num_blocks=200)
TIGHT = EngineOptions(num_blocks=9, max_sequences=5, max_batched_tokens=19)
SHAPES = {
    "llama": dict(),
    "biased llama": dict(attention_bias=True),
    "qwen2": dict(model_type="qwen2", head_dim=64, hidden_size=128),
    "qwen3": dict(model_type="qwen3", head_dim=16),
}


def prompts(vocab: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(params=SHAPES)
def folder(request, tmp_path) -> Path:
    return write_checkpoint(tmp_path / "model", seed=5, **SHAPES[request.param])


def test_bfloat16_keeps_its_bits(folder):
    roomy, other = (Engine.from_pretrained(folder, ROOMY, dtype=torch.bfloat16) for _ in range(2))
    tight = Engine.from_pretrained(folder, TIGHT, dtype=torch.bfloat16)
    texts = prompts(roomy.spec.vocab)
    alone = [
        Engine.from_pretrained(folder, ROOMY, dtype=torch.bfloat16).generate([p], PARAMS, [i])[0]
        for i, p in enumerate(texts)
    ]
    assert roomy.generate(texts, PARAMS) == alone
    assert tight.generate(texts, PARAMS) == alone
    for steps in (1, 4, 11):
        for i, text in enumerate(texts):
            roomy.add(i, text, PARAMS)
        results = [result for _ in range(steps) for result in roomy.step()]
        here = [state.sample_id for state in roomy.unfinished()]
        assert move(roomy, other, here, with_kv=True, as_bytes=True) == []
        while other.has_unfinished():
            results += other.step()
        assert sorted(results, key=lambda r: r.sample_id) == alone


def test_bfloat16_is_near_float32_of_the_same_weights(folder, tmp_path, capsys):
    """Teacher-forced: every beginning of the float32 model's samples, one greedy token of each model."""
    half, full = Engine.from_pretrained(folder, ROOMY, dtype=torch.bfloat16), Engine.from_pretrained(folder, ROOMY)
    from rlhfuse.models.hf import load_weights

    rounded = load_weights(folder, ModelSpec.from_config(folder), dtype=torch.bfloat16)
    full.load_weights({name: weight.float() for name, weight in rounded.items()})
    texts = [[*r.prompt_tokens, *r.tokens] for r in full.generate(prompts(full.spec.vocab), PARAMS)]
    beginnings = [text[:end] for text in texts for end in range(max(1, len(text) - 20), len(text))]
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    pairs = list(zip(half.generate(beginnings, greedy), full.generate(beginnings, greedy)))
    same = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs if a.tokens == b.tokens]
    with capsys.disabled():
        mean = sum(same) / len(same)
        print(f"\nbfloat16: {len(same)} of {len(pairs)} greedy tokens equal; within {max(same):.3f}, mean {mean:.4f}")
    assert len(same) > 0.9 * len(pairs)
    assert mean < 0.02 and max(same) < 0.1


def samples_on(threads: int, folder: Path) -> dict[str, list]:
    """[tokens, logprobs] of samples "batched" and "alone", from a process of its own with so many threads."""
    program = (
        "import sys; from test_bfloat16_and_threads import print_samples; print_samples(int(sys.argv[1]), sys.argv[2])"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "tests/gen", "tests/gen/cpu"))
    run = subprocess.run(
        [sys.executable, "-c", program, str(threads), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths} | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
        timeout=540,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def print_samples(threads: int, folder: str) -> None:
    """Chunks of a few hundred tokens, decode in batches, then each sample alone, as one line of JSON."""
    torch.set_num_threads(threads)
    engine = Engine.from_pretrained(folder, EngineOptions(num_blocks=100, max_batched_tokens=300))
    texts = prompts(engine.spec.vocab, (1, 40, 200, 17, 250, 90, 33, 5, 15, 16))
    params = SamplingParams(max_tokens=8, seed=2, ignore_eos=True)
    batched = engine.generate(texts, params)
    alone = [engine.generate([text], params, [i])[0] for i, text in enumerate(texts)]
    assert torch.get_num_threads() == threads
    print(
        json.dumps(
            {
                name: [(r.tokens, r.logprobs) for r in results]
                for name, results in (("batched", batched), ("alone", alone))
            }
        )
    )


def test_two_threads_give_the_bits_of_one(tmp_path):
    shape = dict(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        intermediate_size=688,
        vocab_size=512,
        num_hidden_layers=3,
        max_position_embeddings=512,
    )
    folder = write_checkpoint(tmp_path / "model", seed=5, **shape)
    one, two = samples_on(1, folder), samples_on(2, folder)
    assert one["batched"] == one["alone"] == two["batched"] == two["alone"]


@pytest.mark.slow
def test_two_threads_on_a_wide_model(tmp_path, capsys):
    shape = dict(
        hidden_size=512,
        num_attention_heads=8,
        head_dim=64,
        intermediate_size=1376,
        vocab_size=2048,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )
    folder = write_checkpoint(tmp_path / "model", seed=5, **shape)
    one, two = samples_on(1, folder), samples_on(2, folder)
    assert one["batched"] == one["alone"]
    with capsys.disabled():
        print(
            f"\ntwo threads, wide model: bits equal to one thread: {one == two}, batched equal alone: "
            f"{two['batched'] == two['alone']}"
        )
    for (tokens, logprobs), (others, other_logprobs) in zip(one["alone"], two["alone"]):
        assert tokens == others
        assert max(abs(a - b) for a, b in zip(logprobs, other_logprobs)) < 1e-5
