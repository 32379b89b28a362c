"""tools/plan.py --what-if: placements after the plan, as text and JSON, on machines of several kinds."""

from __future__ import annotations

import json

import pytest
from test_plan import plan
from testkit.finished_run import MODEL
from testkit.paths import ROOT

LLAMA3 = MODEL | dict(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
)
EIGHT = ROOT / "examples/llama3_8b_8gpus.yaml"
SMALL = ("rollout.prompts_per_iteration=64", "fusion.actor_microbatches=8", "fusion.intra_stage=serial")


@pytest.fixture
def on_eight(tmp_path):
    """A caller of the tool with models of a config.json alone, in an order that is not searched."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    return lambda *words: plan(EIGHT, f"actor.path={tmp_path}", f"reward.path={tmp_path}", *SMALL, *words)


def test_placements_follow_the_plan(on_eight):
    done = on_eight("--what-if")
    plan_alone, _, told = done.stdout.partition("\nwhat if: ")
    assert plan_alone == on_eight().stdout.rstrip("\n") and "what if" not in done.stderr
    rows = [line.split("  ")[1] for line in told.splitlines() if line.startswith("  ") and line[2] != " "]
    assert rows[:4] == ["placement", "colocated, fused", "colocated, serial", "split training"]
    fused, serial = (line for line in told.splitlines() if line.startswith("  colocated, "))
    assert float(fused.split()[2]) == pytest.approx(seconds_of(plan_alone), rel=1e-3) and " 1.00 " in fused
    assert "@0-7 generation d" in serial
    assert told == on_eight("--what-if").stdout.partition("\nwhat if: ")[2]  # nothing is random


def seconds_of(told: str) -> float:
    """Fused, of an iteration, without what is said of CUDA graphs."""
    lines = {line[2:26].strip(): line.split() for line in told.splitlines()}
    graphs = float(lines["CUDA graphs recorded"][-1]) if "CUDA graphs recorded" in lines else 0.0
    return float(lines["iteration"][2]) - graphs


def test_as_json_beside_the_plan(on_eight):
    raw = json.loads(on_eight("--what-if", "--json").stdout)
    found = {row["name"]: row for row in raw["what_if"]["placements"]}
    assert raw["world_size"] == 8 and "free" in found
    assert "what_if" not in json.loads(on_eight("--json").stdout)
    calls = found["critic across iterations"]["calls"]
    assert calls["generation"]["ranks"] == calls["actor_train"]["ranks"] != calls["critic_train"]["ranks"]
    assert calls["critic_train"]["ranks"] in ([0, 3], [4, 7])
    assert found["free"]["seconds"] <= found["split training"]["seconds"]


def test_machines_of_two_kinds(on_eight):
    over = ["trainer.hardware=a100:8,h100:8", "rollout.prompts_per_iteration=64", "algorithm.minibatches=2"]
    over += [f"parallel.{task}_train=d4t1p4" for task in ("actor", "critic")]
    over += ["parallel.generation=d8t2p1", "parallel.inference=d8t2p1", "fusion.actor_microbatches=8"]
    raw = json.loads(on_eight(*over, "--what-if", "--json").stdout)
    assert raw["hardware"] == "a100:8,h100:8" and raw["world_size"] == 16 and raw["efficiency"] is None
    assert raw["memory_limit_source"] == "of the smallest of a100:8,h100:8"
    split = next(row for row in raw["what_if"]["placements"] if row["name"] == "split training")
    assert {tuple(split["calls"][name]["ranks"]) for name in ("actor_train", "critic_train")} == {(0, 7), (8, 15)}
    refused = on_eight("trainer.hardware=a100:4,h100:4")
    assert refused.returncode == 2 and not refused.stdout
    assert refused.stderr.startswith("error: trainer.hardware: a100:4,h100:4: 4 of a100 are no whole machines of 8")
    assert "!= world_size(8)" in on_eight("trainer.hardware=a100:8,h100:8").stderr


def test_on_a_cpu(run_yaml):
    done = plan(run_yaml, "--what-if", "fusion.intra_stage=serial")
    assert "critic across iterations" in done.stdout and "@2-3 " in done.stdout
