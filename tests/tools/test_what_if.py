"""tools/plan.py --what-if as a program: placements after the plan, as text and JSON, on machines of several kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA3 = dict(
    model_type="llama",
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
)


@pytest.fixture
def on_eight(tmp_path: Path) -> list[str]:
    """Of examples/llama3_8b_8gpus.yaml, with models of a config.json alone, in an order that is not searched."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    config = str(ROOT / "examples/llama3_8b_8gpus.yaml")
    small = ["rollout.prompts_per_iteration=64", "fusion.actor_microbatches=8", "fusion.intra_stage=serial"]
    return ["--config", config, f"actor.path={tmp_path}", f"reward.path={tmp_path}", *small]


def program(*args: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK")}
    command = [sys.executable, str(ROOT / "tools/plan.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=540)


def test_placements_follow_the_plan(on_eight):
    done = program(*on_eight, "--what-if")
    assert done.returncode == 0, done.stderr
    plan, _, told = done.stdout.partition("\nwhat if: ")
    assert plan == program(*on_eight).stdout.rstrip("\n") and "what if" not in done.stderr
    rows = [line.split("  ")[1] for line in told.splitlines() if line.startswith("  ") and line[2] != " "]
    assert rows[:4] == ["placement", "colocated, fused", "colocated, serial", "split training"]
    fused, serial = (line for line in told.splitlines() if line.startswith("  colocated, "))
    assert float(fused.split()[2]) == pytest.approx(seconds_of(plan), rel=1e-3) and " 1.00 " in fused
    assert "@0-7 generation d" in serial
    assert told == program(*on_eight, "--what-if").stdout.partition("\nwhat if: ")[2]  # nothing is random


def seconds_of(plan: str) -> float:
    """Fused, of an iteration, without what is said of CUDA graphs."""
    lines = {line[2:26].strip(): line.split() for line in plan.splitlines()}
    graphs = float(lines["CUDA graphs recorded"][-1]) if "CUDA graphs recorded" in lines else 0.0
    return float(lines["iteration"][2]) - graphs


def test_as_json_beside_the_plan(on_eight):
    done = program(*on_eight, "--what-if", "--json")
    raw = json.loads(done.stdout)
    found = {row["name"]: row for row in raw["what_if"]["placements"]}
    assert (
        raw["world_size"] == 8 and "free" in found and "what_if" not in json.loads(program(*on_eight, "--json").stdout)
    )
    calls = found["critic across iterations"]["calls"]
    assert calls["generation"]["ranks"] == calls["actor_train"]["ranks"] != calls["critic_train"]["ranks"]
    assert calls["critic_train"]["ranks"] in ([0, 3], [4, 7])
    assert found["free"]["seconds"] <= found["split training"]["seconds"]


def test_machines_of_two_kinds(on_eight):
    over = ["trainer.hardware=a100:8,h100:8", "rollout.prompts_per_iteration=64", "algorithm.minibatches=2"]
    over += [f"parallel.{task}_train=d4t1p4" for task in ("actor", "critic")]
    over += ["parallel.generation=d8t2p1", "parallel.inference=d8t2p1", "fusion.actor_microbatches=8"]
    done = program(*on_eight, *over, "--what-if", "--json")
    assert done.returncode == 0, done.stderr
    raw = json.loads(done.stdout)
    assert raw["hardware"] == "a100:8,h100:8" and raw["world_size"] == 16 and raw["efficiency"] is None
    assert raw["memory_limit_source"] == "of the smallest of a100:8,h100:8"
    split = next(row for row in raw["what_if"]["placements"] if row["name"] == "split training")
    assert {tuple(split["calls"][name]["ranks"]) for name in ("actor_train", "critic_train")} == {(0, 7), (8, 15)}
    refused = program(*on_eight, "trainer.hardware=a100:4,h100:4")
    assert refused.returncode == 2 and not refused.stdout
    assert refused.stderr.startswith("error: trainer.hardware: a100:4,h100:4: 4 of a100 are no whole machines of 8")
    assert "!= world_size(8)" in program(*on_eight, "trainer.hardware=a100:8,h100:8").stderr


def test_on_a_cpu(run_yaml):
    done = program("--config", run_yaml, "--what-if", "fusion.intra_stage=serial")
    assert done.returncode == 0, done.stderr
    assert "critic across iterations" in done.stdout and "@2-3 " in done.stdout
