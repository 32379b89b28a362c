"""Samples that move between two engines of one process in the middle of generation, and how fast blocks are copied."""

from __future__ import annotations

from typing import Any

import torch
from gpu_checks.bench import DTYPES, Bench
from gpu_checks.generation import agreement
from gpu_checks.result import TOLERANCE, require
from gpu_checks.speed import best_seconds

from rlhfuse.decisions.migration import MoveMode
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

SAMPLES, STEPS = 12, 14


def finish(engine: Engine, results: dict[int, Any], steps: int | None = None) -> None:
    """Step to the end, or so many steps."""
    while engine.has_unfinished() and steps != 0:
        results |= {result.sample_id: result for result in engine.step()}
        steps = None if steps is None else steps - 1


def move(source: Engine, destination: Engine, samples: list[int], mode: MoveMode) -> int:
    """Move unfinished samples; returns how many are run again from their tokens."""
    with source.export_sequences(samples, mode) as transfer:
        with destination.import_sequences(transfer.manifest) as transaction:
            if missing := transaction.missing_blocks:
                transaction.write(missing, transfer.read(missing, slice(None)))
            return len(transaction.recomputed)


def check_move(bench: Bench, kind: str, mode: MoveMode) -> dict:
    """Half of the samples move in the middle of generation; all tokens are those of a run in which none moves."""
    model, generator = bench.tiny(), torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 200, (3 + 5 * (i % 4),), generator=generator).tolist() for i in range(SAMPLES)]
    params = SamplingParams(max_tokens=64, ignore_eos=True, seed=3)
    options = EngineOptions(num_blocks=256, kernels="torch")
    alone, source, destination = (
        Engine.from_pretrained(model, options, device=bench.where, dtype=DTYPES[kind]) for _ in range(3)
    )
    wanted: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for engine in (alone, source):
        for sample, prompt in enumerate(prompts):
            engine.add(sample, prompt, params)
    finish(alone, wanted)
    finish(source, found, STEPS)
    moving = [seq.sample_id for seq in source.unfinished()][: SAMPLES // 2]
    recomputed = move(source, destination, moving, mode)
    for engine in (source, destination):
        finish(engine, found)
        engine.check_integrity()
    rows = [[{"tokens": r.tokens, "logprobs": r.logprobs} for _, r in sorted(x.items())] for x in (wanted, found)]
    detail = agreement(*rows) | {"moved": len(moving), "recomputed": recomputed}
    least = detail["tokens"] * (0.98 if kind == "float32" else 0.3)  # after a near tie all differ
    good = detail["equal_tokens"] >= least and recomputed == (len(moving) if mode == "tokens" else 0)
    return require(good and detail["max_logprob_difference"] < 2 * TOLERANCE[DTYPES[kind]], detail)


def check_block_copies(bench: Bench) -> dict:
    """Bytes per second of reading blocks of a cache of 8B into a message and of writing them into another cache."""
    layers, blocks, dim = (32, 512, 128) if bench.on_gpu else (2, 64, 16)
    caches = [KVCache(layers, blocks, 16, 8, dim, dtype=torch.bfloat16, device=bench.where) for _ in range(2)]
    caches[0].keys.normal_()
    caches[0].values.normal_()
    half = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))[: blocks // 2].tolist()
    message = caches[0].read_blocks(half)
    size = message.numel() * message.element_size()
    reading = best_seconds(lambda: caches[0].read_blocks(half), bench.where)
    writing = best_seconds(lambda: caches[1].write_blocks(half, message), bench.where)
    same = torch.equal(caches[1].read_blocks(half), message)
    rates = {"read_bytes_per_second": size / reading, "write_bytes_per_second": size / writing}
    return require(same, {"bytes": size, **rates})
