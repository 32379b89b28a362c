"""The whole program: on one rank, on ranks that share a GPU, on a GPU each; fused against serial, and how much sooner.

Ranks are forked from a process that has imported the program. Numbers of two runs on a GPU are compared by their
relative difference: whether all bits are equal is told beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_checks.bench import SHAPES, TINY, Bench, write_model
from gpu_checks.ranks import fork_ranks
from gpu_checks.result import CheckFailed, require

from rlhfuse.tasks.task import TRAINED

SERIAL = ("fusion.inter_stage=false", "fusion.intra_stage=false")
NEAR = 1e-2  # largest relative difference between metrics of two float32 runs that differ in the order of their sums
APART = 0.1  # the same of bfloat16, which promises no bits
# 0.5e9 parameters whose products are worth their launches; one token in 256 ends a response: lengths have a tail
LARGE = dict(SHAPES["1b"], num_hidden_layers=8, vocab_size=256, tie_word_embeddings=False)


def layouts_of(kind: str, ranks: int) -> dict[str, str]:
    """Pipelines over all ranks in both directions, or tensor ranks and replicas too."""
    if kind == "pipelines":
        whole = f"d1t1p{ranks}"
        return {**dict.fromkeys(TRAINED, whole), "generation": f"d{ranks}t1p1"}
    half = ranks // 2
    return {**dict(zip(TRAINED, (f"d2t1p{half}", f"d1t2p{half}"))), "generation": f"d{half}t2p1"}


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
    config["rollout"]["attention"] = bench.attention
    config["trainer"]["dtype"] = "float32"  # what runs are compared in, unless a check says otherwise
    for group, keys in settings.items():
        config.setdefault(group, {}).update(keys)
    file = bench.folder / "check.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return file


def models_of(bench: Bench, shape: dict) -> dict[str, Any]:
    """Settings of an actor and a reward model of this shape, or tiny ones where there is no GPU."""
    heads = {"actor": False, "reward": True}
    shape, folder = shape if bench.on_gpu else TINY, bench.folder / "models"
    made = {role: write_model(folder / role, shape, scalar_head=head) for role, head in heads.items()}
    return {role: {"path": str(path)} for role, path in made.items()}


def run(config: Path, out: Path, *overrides: str, **how: Any) -> str:
    """The program on `ranks` processes of this machine; returns what it said. `how`: as for `start`.

    CheckFailed unless all ended with 0.
    """
    codes, said = start(config, out, *overrides, **how)
    if any(codes):
        raise CheckFailed(f"{out.name}: exit codes {codes}: {said[-1500:]}")
    return said


def start(
    config: Path,
    out: Path,
    *overrides: str,
    ranks: int = 1,
    before: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[int | None], str]:
    """The same: exit codes, and what it said. Each process calls `before` first."""
    arguments = ["--config", str(config), *overrides, f"trainer.output_dir={out}"]

    def work() -> None:
        import train_ppo
        from program import prints_error, run_program

        before()
        sys.argv = ["train_ppo.py", *arguments]
        run_program(train_ppo.main, tear_down=False, prints=prints_error)

    return fork_ranks(ranks, work, out.with_suffix(".log"), environment)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def differences(a: Path, b: Path) -> dict[str, Any]:
    """How far two runs are apart: entries that differ, and the largest relative difference of a metric."""
    from run_comparison import compare_runs

    compared = compare_runs(a, b)
    differing = [difference for one in compared for difference in one.differences]
    worst, where = 0.0, ""
    for difference in compared[0].differences:
        try:
            x, y = float(difference.a), float(difference.b)
        except ValueError:  # a digest of bits, which no GPU promises: numbers beside it say how far apart they are
            continue
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
    return require(len(rows) == 2 and detail["relative_difference"] < APART, detail)


def check_not_finite(bench: Bench) -> dict:
    """A critic that one step ruins: its values in the next iteration are NaN; the run ends naming one."""
    config = write_config(bench, critic={"optim": {"lr": 1e37}}, trainer={"save_every": 1, "iterations": 3})
    codes, said = start(config, out := bench.folder / "run", "algorithm.minibatches=1", "fusion.inter_stage=false")
    errors = [line.strip() for line in said.splitlines() if "error: iteration 1: " in line]
    detail = {"exit_codes": codes, "error": errors[0] if errors else said[-600:]}
    named = bool(errors) and "a value of the critic is nan" in errors[0]
    return require(named and all(codes) and len(metrics(out)) == 1, detail)


def check_shared(bench: Bench, layouts: str) -> dict:
    """Four ranks on one GPU, the first that is visible: fused in both ways against serial; samples are handed over."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return _fused_and_serial(bench, layouts, 4, share_gpu=bench.on_gpu, CUDA_VISIBLE_DEVICES=first)


def check_apart(bench: Bench, layouts: str, ranks: int) -> dict:
    """The same on a GPU for each rank."""
    return _fused_and_serial(bench, layouts, ranks, share_gpu=False)


def _fused_and_serial(bench: Bench, layouts: str, ranks: int, share_gpu: bool, **environment: str) -> dict:
    config = write_config(bench, parallel=layouts_of(layouts, ranks), trainer={"share_gpu": share_gpu})
    fused, serial = bench.folder / "fused", bench.folder / "serial"
    said = run(config, fused, "fusion.threshold=16", ranks=ranks, environment=environment)
    run(config, serial, *SERIAL, ranks=ranks, environment=environment)
    detail: dict[str, Any] = differences(fused, serial)
    detail["backend"] = next(name for name in ("shared_gpu", "nccl", "gloo") if f"({name})" in said)
    detail["migrated_samples"] = sum(row["fusion/migrated_samples"] for row in metrics(fused))
    good = detail["relative_difference"] < NEAR and detail["migrated_samples"] > 0
    return require(good and (bench.on_gpu or detail["bit_equal"]), detail)


def check_speedup(bench: Bench, ranks: int) -> dict:
    """bfloat16, a GPU for each rank: seconds of serial and fused iterations, beside the plan's; the same numbers."""
    rollout = {"prompts_per_iteration": 16 * ranks, "max_response_tokens": 1024} if bench.on_gpu else {}
    config = write_config(
        bench,
        **models_of(bench, LARGE),
        parallel=layouts_of("pipelines", ranks),
        rollout=rollout,
        fusion={"actor_microbatches": 4 * ranks if bench.on_gpu else 4},
        trainer={"dtype": "bfloat16", "iterations": 4 if bench.on_gpu else 2, "export": False},
    )
    fused, serial = bench.folder / "fused", bench.folder / "serial"
    run(config, serial, *SERIAL, ranks=ranks)
    run(config, fused, ranks=ranks)
    detail: dict[str, Any] = differences(fused, serial)
    planned = json.loads((fused / "plan.json").read_text())["seconds"]
    detail["lines"] = []
    for part, key in (("training", "timing_s/train"), ("gen_infer", "fusion/gen_infer_seconds")):
        took = {run.name: min(row[key] for row in metrics(run)[1:]) for run in (serial, fused)}  # after a warm-up
        predicted = {name: planned[f"{part}_{name}"] for name in took}
        detail[part] = {"seconds": took, "planned_seconds": predicted}
        ratios = [seconds["serial"] / seconds["fused"] for seconds in (took, predicted)]
        told = f"{part} on {ranks} ranks: {took['serial']:.3g} s serial, {took['fused']:.3g} s fused"
        detail["lines"].append(f"{told}: {ratios[0]:.2f} times as fast, planned {ratios[1]:.2f}")
    return require(detail["relative_difference"] < APART, detail)
