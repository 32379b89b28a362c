"""Peak memory of a training run's phases against its plan: models wide enough that they, and not Python, decide."""

from __future__ import annotations

import pytest
from testkit.runs_table import metrics_of, plan_of
from testkit.tiny import write_checkpoint, write_run

PHASES = ("moves", "generation", "inference", "training")
WIDE = dict(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=2000,
    max_position_embeddings=512,
)


@pytest.mark.slow
def test_phases_need_what_was_planned(programs, tmp_path):
    file = write_run(
        tmp_path,
        rollout__max_response_tokens=200,
        rollout__max_batched_tokens=512,
        trainer__iterations=2,
        fusion__bucket_mib=2,
        trainer__export=False,
        algorithm__minibatches=1,
    )
    for role in ("actor", "reward"):
        write_checkpoint(tmp_path / role, scalar_head=role == "reward", seed=1, scale=0.1, **WIDE)
    programs.trained(file)
    last = {name: metrics_of(tmp_path / "run")[-1][f"perf/peak_memory_gb/{name}"] * 1e9 for name in ("base", *PHASES)}
    differences = {}
    for phase in plan_of(tmp_path / "run")["memory"]:
        parts = ("weights", "optimizer", "gradients", "activations", "kv", "buckets", "host")
        planned = sum(phase[part] for part in parts)
        measured = last[phase["phase"]] - last["base"]
        numbers = f"planned {planned / 1e6:6.1f} MB, measured {measured / 1e6:6.1f} MB"
        print(f"{phase['phase']:11s} {numbers} beside the base")
        differences[phase["phase"]] = last[phase["phase"]] / (last["base"] + planned) - 1
    assert max(map(abs, differences.values())) <= 0.15, differences
