"""Whole runs whose generation is kept or released: what is recorded in which iteration, and memory beside the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gpu_checks.bench import TINY, Bench
from gpu_checks.programs import APART, differences, metrics, models_of, run, write_config
from gpu_checks.result import require

ITERATIONS = 3
LEAVING = 1.05  # of the fullest phase with generation kept: a limit under which it is released
SHAPE = dict(  # 0.2e9 parameters: weights and cache are most of what a rank holds
    TINY, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
    intermediate_size=4096, vocab_size=32000, max_position_embeddings=2048,
)  # fmt: skip
PARTS = ("weights", "optimizer", "gradients", "activations", "kv", "buckets")


def check_kept(bench: Bench) -> dict:
    """Three iterations of samples of one length, so that each decodes the same shapes, twice over.

    Kept: all are recorded in the first, none again. Released, under a memory limit: in every one.
    """
    length = 512 if bench.on_gpu else 16
    rollout = {"ignore_eos": True, "max_response_tokens": length, "prompts_per_iteration": 8}
    trainer = {"dtype": "bfloat16", "iterations": ITERATIONS, "export": False}
    config = write_config(bench, **models_of(bench, SHAPE), rollout=rollout, trainer=trainer)
    kept, released = (bench.folder / name for name in ("kept", "released"))
    found: dict[str, Any] = {"kept": _watched(config, kept)}
    plan = json.loads((kept / "plan.json").read_text())
    fullest = max(sum(phase[part] for part in (*PARTS, "host")) for phase in plan["memory"]["phases"])
    fullest += plan["memory"]["process_bytes"]
    found["released"] = _watched(config, released, f"trainer.memory_limit_gb={LEAVING * fullest / 1e9}")
    detail: dict[str, Any] = found | differences(kept, released)
    first, *_, last = found["released"]["iterations"]
    if shapes := last["recorded_shapes"] - first["recorded_shapes"]:  # kernels are compiled in the first
        detail["capture_seconds_per_shape"] = (last["recording_seconds"] - first["recording_seconds"]) / shapes
    capture = plan["generation"]["capture"]
    detail["planned_capture_seconds_per_shape"] = capture["shape_seconds"] if capture else None
    return require(as_planned(found, bench.on_gpu) and detail["relative_difference"] < APART, detail)


def as_planned(found: dict[str, Any], on_gpu: bool) -> bool:
    """On a GPU generation is kept where there is room, and recorded once there; on the CPU nothing is."""
    shapes = {name: [row["recorded_shapes"] for row in one["iterations"]] for name, one in found.items()}
    first = shapes["kept"][0]
    once = shapes["kept"] == [first] * ITERATIONS
    again = shapes["released"] == [first * (number + 1) for number in range(ITERATIONS)]
    keeps = found["kept"]["keeps_generation"] == bool(first) == on_gpu
    return once and again and keeps and not found["released"]["keeps_generation"]


def _watched(config: Path, out: Path, *overrides: str) -> dict[str, Any]:
    """A run: recorded shapes after each iteration; bytes of each phase as planned, allocated and reserved at most."""
    seen = out.with_suffix(".json")
    run(config, out, *overrides, before=lambda: _watch(seen))
    plan, rows, found = json.loads((out / "plan.json").read_text()), metrics(out), json.loads(seen.read_text())
    memory = {}
    for phase in plan["memory"]["phases"]:
        name = phase["phase"]
        if name == "start":
            continue
        allocated = max(row[f"perf/peak_memory_gb/{name}"] for row in rows) * 1e9
        planned = sum(phase[part] for part in PARTS)
        memory[name] = {"planned": planned, "allocated": allocated, "reserved": found["reserved"].get(name)}
    return {"keeps_generation": plan["memory"]["keeps_generation"], "iterations": found["iterations"], "memory": memory}


def _watch(file: Path) -> None:
    """Have this rank's trainer write down what its metrics do not say."""
    from rlhfuse.parallel.memory import PhaseMeter
    from rlhfuse.run.trainer import Trainer

    rows: list[dict[str, Any]] = []
    reserved: dict[str, int] = {}
    iterate, switch = Trainer.iterate, PhaseMeter.switch

    def iterated(self: Trainer, iteration: int) -> Any:
        record, forward = iterate(self, iteration), self.engine.forward
        rows.append({"recorded_shapes": forward.recorded_shapes, "recording_seconds": forward.recording_seconds})
        file.write_text(json.dumps({"iterations": rows, "reserved": reserved}))
        return record

    def switched(self: PhaseMeter, phase: str | None) -> None:
        if self._phase and self._device.is_cuda:
            most = torch.cuda.max_memory_reserved(self._device.torch_device)
            reserved[self._phase] = max(most, reserved.get(self._phase, 0))
        switch(self, phase)

    Trainer.iterate, PhaseMeter.switch = iterated, switched  # type: ignore[method-assign]
