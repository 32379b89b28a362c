"""tools/compare_runs.py: exit codes, and what it says of the first difference."""

import json
import os

import pytest
import torch
from run_comparison import compare_runs
from safetensors.torch import save_file
from testkit.programs import call_tool

from rlhfuse.base.errors import InputError

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.tensor([0.0, 1.0]).bfloat16()}


def unlike(iteration):
    """What may differ from run to run: of the clock, and of the cut into micro-batches."""
    return {"timing_s/gen": os.urandom(1)[0], "global_seqlen/max": iteration + os.urandom(1)[0]}


def make_run(folder, metrics=None, actor=WEIGHTS, critic=WEIGHTS):
    rows = metrics or [{"iteration": i, "critic/score/mean": 0.1 * i, **unlike(i)} for i in (1, 2)]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, weights in (("actor", actor), ("critic", critic)):
        if weights:
            (folder / "export" / name).mkdir(parents=True)
            save_file(weights, folder / "export" / name / "model.safetensors")
    return folder


def test_tool_tells_equal_different_and_bad_input(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    same = call_tool("compare_runs", a, b)
    assert same.returncode == 0 and same.stdout.strip().endswith("equal"), same
    changed = {**WEIGHTS, "a.weight": WEIGHTS["a.weight"] + torch.tensor([0.0, 0.5, 0.0])}
    different = call_tool("compare_runs", a, make_run(tmp_path / "c", critic=changed))
    assert different.returncode == 1
    assert "a.weight[1], 2 of 6 elements" in different.stdout and "0.5" in different.stdout
    bad = call_tool("compare_runs", a, tmp_path / "nothing")
    assert bad.returncode == 2 and bad.stderr.startswith("error: ") and "nothing is no run directory" in bad.stderr
    assert call_tool("compare_runs", "--help").returncode == 0


def test_one_bit_counts(tmp_path):
    """-0.0 equals 0.0 as a number; a run that wrote the other bit is different all the same."""
    flipped = {**WEIGHTS, "b.bias": torch.tensor([-0.0, 1.0]).bfloat16()}
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", actor=flipped)
    metrics, actor, critic = compare_runs(a, b)
    assert [d.where for d in actor.differences] == ["b.bias[0], 1 of 2 elements"] and actor.largest == 0.0
    assert not critic.differences and critic.entries == 2


def test_missing_tensor_shape_and_export_are_differences(tmp_path):
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", actor={"a.weight": torch.zeros(3, 2)}, critic=None)
    _, actor, critic = compare_runs(a, b)
    assert [(d.where, d.a, d.b) for d in actor.differences] == [
        ("a.weight", "float32 [2, 3]", "float32 [3, 2]"),
        ("b.bias", "present", "missing"),
    ]
    assert len(critic.differences) == 2


def test_broken_export_is_bad_input(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (b / "export/actor/model.safetensors").write_bytes(b"half a file")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        compare_runs(a, b)
