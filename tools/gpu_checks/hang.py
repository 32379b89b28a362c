"""The hang laboratory: a kernel that spins until the device sets a flag stands for a posted receive, and behind it a
stage runs for the first time. Which settings let it run, and which wait for ever?

The spinning kernel is released by a kernel that is launched after the stage's work, as a peer would answer only then.
Every variant is a process of its own, ended after its seconds: a hang is a finding, but for the settings that the
program itself runs with.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from gpu_checks.bench import Bench
from gpu_checks.result import require

SECONDS = 30.0


@dataclass(frozen=True)
class Variant:
    """How CUDA is started, and what stands behind how many receives."""

    loading: str = "LAZY"  # CUDA_MODULE_LOADING
    queues: str = "32"  # CUDA_DEVICE_MAX_CONNECTIONS
    warm: bool = True  # the stage has run before
    behind: str = ""  # answered: the peer has what it needs before the receive is posted, as in the program
    streams: int = 2


VARIANTS = {
    "answered": Variant(warm=False, behind="answered", streams=4),
    "ahead_warm": Variant(streams=4),
    "ahead_first_lazy": Variant(warm=False),
    "ahead_first_eager": Variant(loading="EAGER", warm=False),
    "ahead_few_queues": Variant(queues="8", streams=8),
    "ahead_allocator_retry": Variant(behind="retry"),
    "ahead_page_locked": Variant(behind="pinned"),
}


def check_hangs(bench: Bench, seconds: float = SECONDS) -> dict:
    """What each variant did: seconds, or that it hung."""
    if not bench.on_gpu:
        return {"skipped": "nothing spins on a CPU"}
    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    for name, variant in VARIANTS.items():
        process = context.Process(target=_try, args=(bench, variant))
        start = time.monotonic()
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            found[name] = "hung"
        else:
            ended = f"exit code {process.exitcode}"
            found[name] = ended if process.exitcode else round(time.monotonic() - start, 1)
    return require(isinstance(found["answered"], float), found)


def _try(bench: Bench, variant: Variant) -> None:
    """One variant, in a process that has not touched the GPU."""
    os.environ |= {"CUDA_MODULE_LOADING": variant.loading, "CUDA_DEVICE_MAX_CONNECTIONS": variant.queues}
    from gpu_checks.spin import hold
    from gpu_checks.stage_bench import MiddleStage

    device = bench.where
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    hold(torch.ones_like(flag), 1)  # compiled and loaded, as communicators are connected at start
    sides = [torch.cuda.Stream() for _ in range(variant.streams)]
    with bench.one_rank():
        stage = MiddleStage("1b", 1, bench)
        batch = stage.batch([700, 300])

        def work() -> None:
            stage.backward(stage.forward(batch))
            stage.optimizer.finish_gradients()
            stage.optimizer.step(1e-5)

        def receive() -> None:
            for side in sides:
                with torch.cuda.stream(side):
                    hold(flag, 2)

        if variant.warm:
            work()
        torch.cuda.synchronize()
        if variant.behind == "answered":
            work()
            flag.fill_(1)
            receive()
        else:
            receive()
            work()
            if variant.behind == "retry":
                _retry(device)
            if variant.behind == "pinned":
                torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
            flag.fill_(1)
        torch.cuda.synchronize()
    os._exit(0)


def _retry(device: torch.device) -> None:
    """Make the allocator give cached memory back to the driver, which waits for all that runs."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (300 << 20)) / total)
    cached = torch.empty(280 << 20, dtype=torch.uint8, device=device)
    del cached
    torch.empty(290 << 20, dtype=torch.uint8, device=device)
