"""How often the host waits for the device: in a decode step, a stage's forward, its backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_checks.bench import Bench
from gpu_checks.result import require
from gpu_checks.stage_bench import MiddleStage, stage_size

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

WARM_UP, COUNTED = 6, 8


def waits_in(work: Callable[[], Any], on_gpu: bool) -> list[str]:
    """Where `work` waits for the device, one entry for each time."""
    if not on_gpu:
        work()
        return []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [one for one in told if "synchronizing" in str(one.message)]
    return [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in found]


def check_waits(bench: Bench) -> dict:
    """At most one wait in a decode step, for its tokens; none in a forward or a backward."""
    options = EngineOptions(num_blocks=256, attention=bench.attention)
    engine = Engine.from_pretrained(bench.tiny(), options, device=bench.where, dtype=torch.bfloat16)
    for sample in range(8):
        engine.add(sample, [3 + sample, 4, 5], SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in range(WARM_UP):
        engine.step()
    steps = [waits_in(engine.step, bench.on_gpu) for _ in range(COUNTED)]
    with bench.one_rank():
        stage = MiddleStage(stage_size(bench), 2, bench)
        batch = stage.batch([300, 200, 12] if bench.on_gpu else [30, 20])
        for _ in range(2):
            stage.backward(stage.forward(batch))
        kept: list[Any] = []
        forward = waits_in(lambda: kept.append(stage.forward(batch)), bench.on_gpu)
        backward = waits_in(lambda: stage.backward(kept[0]), bench.on_gpu)
    detail = {"decode_steps": [len(step) for step in steps], "forward": len(forward), "backward": len(backward)}
    detail["places"] = sorted({*sum(steps, []), *forward, *backward})[:12]
    return require(max(detail["decode_steps"]) <= 1 and not forward and not backward, detail)
