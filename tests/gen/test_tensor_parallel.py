"""Two tensor-parallel ranks take identical steps and give the tokens of one rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from testkit.gen_models import random_weights, tiny_spec
from testkit.moves import move_sequences

from rlhfuse.base.errors import leave
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

SPEC = tiny_spec(qkv_bias=True, proj_bias=True, qk_norm=True, head_dim=16)
PROMPTS = [[9, 10, 11], [12], list(range(20, 60)), [300, 299]]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    engine, other = (
        Engine(
            SPEC,
            random_weights(SPEC, tp_rank=rank, tp_size=2),
            EngineOptions(num_blocks=12, max_batched_tokens=32),
            tp_group=dist.group.WORLD,
        )
        for _ in range(2)
    )
    greedy = [
        engine.generate([p], replace(PARAMS, temperature=0.0, max_tokens=60), [i])[0] for i, p in enumerate(PROMPTS)
    ]
    batched = engine.generate(PROMPTS, PARAMS)
    alone = [engine.generate([p], PARAMS, [i])[0] for i, p in enumerate(PROMPTS)]
    for i, prompt in enumerate(PROMPTS):
        engine.add(i, prompt, PARAMS)
    moved = [r for _ in range(7) for r in engine.step()]
    move_sequences(engine, other, [s.sample_id for s in engine.unfinished()])
    while other.has_unfinished():
        moved += other.step()
    moved.sort(key=lambda r: r.sample_id)
    assert engine.drafter and engine.drafter._right.sum() > 0, "greedy text repeats itself and is foreseen"
    torch.save((batched, alone, moved, greedy), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    leave(0)


def test_two_ranks(tmp_path):
    mp.spawn(run_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first == second, "ranks disagree"
    batched, alone, moved, greedy = first
    assert batched == alone == moved
    single = Engine(SPEC, random_weights(SPEC), EngineOptions(num_blocks=40, draft_rows=0))
    whole = single.generate(PROMPTS, PARAMS)
    longer = single.generate(PROMPTS, replace(PARAMS, temperature=0.0, max_tokens=60))
    assert [r.tokens for r in longer] == [r.tokens for r in greedy]
    assert [r.tokens for r in whole] == [r.tokens for r in batched]
    for a, b in zip(whole, batched):
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-5
