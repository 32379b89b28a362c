"""Samples that move between two engines of one process in the middle of generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gpu_checks.bench import DTYPES, Bench
from gpu_checks.generation import agreement
from gpu_checks.result import TOLERANCE, require

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.tasks.instance_limits import MoveMode

SAMPLES, STEPS = 12, 14


def engines(bench: Bench, model: Path, kind: str, count: int) -> list[Engine]:
    options = EngineOptions(num_blocks=256, kernels="torch", attention=bench.attention)
    made: dict[str, Any] = {"device": bench.where, "dtype": DTYPES[kind]}
    return [Engine.from_pretrained(model, options, **made) for _ in range(count)]


def add_samples(engine: Engine) -> None:
    generator, params = torch.Generator().manual_seed(7), SamplingParams(max_tokens=64, ignore_eos=True, seed=3)
    for sample in range(SAMPLES):
        prompt = torch.randint(3, 200, (3 + 5 * (sample % 4),), generator=generator).tolist()
        engine.add(sample, prompt, params)


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
    alone, source, destination = engines(bench, bench.tiny(), kind, 3)
    wanted: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for engine in (alone, source):
        add_samples(engine)
    finish(alone, wanted)
    finish(source, found, STEPS)
    moving = [seq.sample_id for seq in source.unfinished()][: SAMPLES // 2]
    recomputed = move(source, destination, moving, mode)
    for engine in (source, destination):
        finish(engine, found)
        engine.scheduler.check_integrity()
    detail = {"moved": len(moving), "recomputed": recomputed}
    require(recomputed == (len(moving) if mode == "tokens" else 0), detail)
    return compared(wanted, found, kind) | detail


def compared(wanted: dict[int, Any], found: dict[int, Any], kind: str) -> dict[str, Any]:
    """Results by sample; CheckFailed unless they agree."""
    rows = [[{"tokens": r.tokens, "logprobs": r.logprobs} for _, r in sorted(x.items())] for x in (wanted, found)]
    detail = agreement(*rows)
    least = detail["tokens"] * (0.98 if kind == "float32" else 0.3)  # after a near tie all differ
    close = detail["max_logprob_difference"] < 2 * TOLERANCE[DTYPES[kind]]
    return require(detail["equal_tokens"] >= least and close, detail)
