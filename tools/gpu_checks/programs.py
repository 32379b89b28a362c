"""The whole program: on one rank in bfloat16 and float32, and on four ranks that share the GPU, fused against serial.

Ranks are forked from a process that has imported the program. Numbers of two runs on a GPU are compared by their
relative difference: whether all bits are equal is told beside it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gpu_checks.bench import Bench
from gpu_checks.result import CheckFailed, require

ROOT = Path(__file__).resolve().parents[2]
SERIAL = ("fusion.inter_stage=false", "fusion.intra_stage=false")
NEAR = 1e-2  # largest relative difference between metrics of two float32 runs that differ in the order of their sums
LAYOUTS = {
    "pipelines": {"actor_train": "d1t1p4", "critic_train": "d1t1p4", "generation": "d4t1p1"},
    "cut": {"actor_train": "d2t1p2", "critic_train": "d1t2p2", "generation": "d2t2p1"},
}


def write_config(bench: Bench, **settings: Any) -> Path:
    """A run on the tiny models; `settings` are groups of further keys."""
    prompts = bench.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{3 + i} w{40 + i}"}) + "\n" for i in range(8)))
    config: dict[str, dict] = {
        "actor": {"path": str(bench.tiny()), "optim": {"lr": 1e-4}},
        "reward": {"path": str(bench.tiny(scalar_head=True))},
        "data": {"train_files": [str(prompts)], "max_prompt_tokens": 32},
        "rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 4, "max_response_tokens": 48},
        "algorithm": {"minibatches": 2},
        "fusion": {"search_seconds": 1.0, "actor_microbatches": 4},
        # a rank that is slow to start is not dead
        "trainer": {"iterations": 2, "device": bench.kind, "watchdog_seconds": 120, "tensorboard": False},
    }
    config["trainer"]["dtype"] = "float32"  # what runs are compared in, unless a check says otherwise
    for group, keys in settings.items():
        config.setdefault(group, {}).update(keys)
    file = bench.folder / "check.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return file


def run(config: Path, out: Path, *overrides: str, ranks: int = 1, before: Callable[[], None] = lambda: None) -> str:
    """The program on `ranks` processes of this machine, each of which calls `before` first.

    Returns what it said; CheckFailed unless all ended with 0.
    """
    codes, said = start(config, out, *overrides, ranks=ranks, before=before)
    if any(codes):
        raise CheckFailed(f"{out.name}: exit codes {codes}: {said[-1500:]}")
    return said


def start(
    config: Path, out: Path, *overrides: str, ranks: int = 1, before: Callable[[], None] = lambda: None
) -> tuple[list[int | None], str]:
    """The same: exit codes, and what it said."""
    # as torchrun's agent has it
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    context, log = multiprocessing.get_context("fork"), out.with_suffix(".log")
    arguments = ["--config", str(config), *overrides, f"trainer.output_dir={out}"]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        processes.append(context.Process(target=_run_rank, args=(place, arguments, log, before)))
        processes[-1].start()
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):  # the others may wait for it
            for process in processes:
                process.join(10)
                process.kill()
        time.sleep(0.05)
    return [process.exitcode for process in processes], log.read_text(errors="replace")


def _run_rank(place: dict[str, Any], arguments: list[str], log: Path, before: Callable[[], None]) -> None:
    with open(log, "ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import train_ppo

    from rlhfuse.base.errors import run_program

    before()
    sys.argv = ["train_ppo.py", *arguments]
    run_program(train_ppo.main, tear_down=False)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def differences(a: Path, b: Path) -> dict[str, Any]:
    """How far two runs are apart: entries that differ, and the largest relative difference of a metric."""
    from rlhfuse.run.report.compare import compare_runs

    compared = compare_runs(a, b)
    differing = [difference for one in compared for difference in one.differences]
    worst, where = 0.0, ""
    for difference in compared[0].differences:
        try:
            x, y = float(difference.a), float(difference.b)
        except ValueError:
            worst, where = float("inf"), difference.where
            break
        if (apart := abs(x - y) / max(abs(x), abs(y), 1e-3)) > worst:
            worst, where = apart, difference.where
    exported = max((one.largest for one in compared[1:]), default=0.0)
    entries = sum(one.entries for one in compared)
    counted = {"entries": entries, "different": len(differing), "bit_equal": not differing}
    return counted | {"worst_metric": where, "relative_difference": worst, "weights_apart": exported}


def check_one_rank(bench: Bench, dtype: str, **algorithm: Any) -> dict:
    """Two iterations of the whole program on one rank; its engine and its trainer agree on log-probabilities."""
    bound = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    config = write_config(bench, trainer={"dtype": dtype}, algorithm=algorithm)
    start_time = time.perf_counter()
    run(config, out := bench.folder / "run")
    rows = metrics(out)
    apart = max(row["rollout/train_logprob_abs_diff"] for row in rows)
    detail = {"iterations": len(rows), "seconds": round(time.perf_counter() - start_time, 1)}
    detail |= {"train_logprob_abs_diff": apart}
    return require(len(rows) == 2 and apart < bound, detail)


def check_resumed(bench: Bench) -> dict:
    """bfloat16, recompute=full: two iterations at once, and one, saved and resumed for the second."""
    config = write_config(bench, trainer={"dtype": "bfloat16", "recompute": "full", "save_every": 1})
    whole, parts = bench.folder / "whole", bench.folder / "parts"
    run(config, whole)
    run(config, parts, "trainer.iterations=1")
    run(config, parts, "trainer.resume=auto")
    rows = metrics(parts)
    detail: dict[str, Any] = differences(whole, parts) | {"iterations": len(rows)}
    return require(len(rows) == 2 and detail["relative_difference"] < 0.1, detail)  # bfloat16, and no bits promised


def check_not_finite(bench: Bench) -> dict:
    """A critic that one step ruins: the next iteration's losses are NaN; the run ends naming it, nothing steps."""
    config = write_config(bench, critic={"optim": {"lr": 1e37}}, trainer={"save_every": 1, "iterations": 3})
    codes, said = start(config, out := bench.folder / "run", "algorithm.minibatches=1", "fusion.inter_stage=false")
    errors = [line.strip() for line in said.splitlines() if "FloatingPointError: iteration 1: " in line]
    detail = {"exit_codes": codes, "error": errors[0] if errors else said[-600:]}
    named = bool(errors) and "the loss" in errors[0] and "no model stepped" in errors[0]
    return require(named and all(codes) and len(metrics(out)) == 1, detail)


def check_shared(bench: Bench, layouts: str) -> dict:
    """Four ranks on the one GPU: fused in both ways against serial; instances hand samples over."""
    config = write_config(bench, parallel=LAYOUTS[layouts], trainer={"share_gpu": bench.on_gpu})
    fused, serial = bench.folder / "fused", bench.folder / "serial"
    said = run(config, fused, "fusion.threshold=16", ranks=4)
    run(config, serial, *SERIAL, ranks=4)
    detail: dict[str, Any] = differences(fused, serial)
    detail["backend"] = "shared_gpu" if "(shared_gpu)" in said else "gloo"
    detail["migrated_samples"] = sum(row["fusion/migrated_samples"] for row in metrics(fused))
    good = detail["relative_difference"] < NEAR and detail["migrated_samples"] > 0
    return require(good and (bench.on_gpu or detail["bit_equal"]), detail)
