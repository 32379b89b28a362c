"""scripts/gpu_check.sh on a machine without a GPU, and its attention checks rehearsed on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def call(*arguments: str, hide_gpu: bool = True) -> tuple[int, dict]:
    """Exit code and the object of the last line."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    if hide_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip(), done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_without_cuda_nothing_is_checked_and_it_says_so():
    code, report = call()
    assert code == 0
    assert report["cuda"] is False and report["checks"] == [] and "nothing was checked" in report["said"]
    assert report["environment"]["torch"]


def test_the_rehearsal_compares_attention_with_the_formula():
    code, report = call("--device", "cpu", "--only", "attention")
    assert code == 0 and report["ok"] is True and report["cuda"] is False
    assert {check["name"] for check in report["checks"]} >= {"varlen_attention_float32", "paged_attention_bfloat16_256"}
    assert all(check["ok"] and check["seconds"] >= 0 for check in report["checks"])


def test_a_failing_check_is_recorded_and_does_not_stop_the_others():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import gpu_check
    finally:
        sys.path.pop(0)
    result = gpu_check.run_check("wrong", lambda: gpu_check.require(False, {"error": 2}))
    assert not result.ok and result.name == "wrong" and '{"error": 2}' in result.detail
    assert gpu_check.run_check("right", lambda: {"error": 0}).ok


@pytest.mark.gpu
def test_every_check_is_good_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    code, report = call(hide_gpu=False)
    assert code == 0, [check for check in report["checks"] if not check["ok"]]
