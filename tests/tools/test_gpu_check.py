"""scripts/gpu_check.sh on a machine without a GPU, and its attention checks rehearsed on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import gpu_check
    finally:
        sys.path.pop(0)
    return gpu_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rehearsed_on_the_cpu_attention_agrees_with_the_formula(gpu_check, dtype):
    device = torch.device("cpu")
    assert set(gpu_check.check_varlen(device, dtype)) == {"forward", "dq", "dk", "dv"}
    for block_tokens in (16, 256):
        assert gpu_check.check_paged(device, dtype, block_tokens)["relative_error"] > 0


def test_wrong_attention_is_found(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "paged_attention", lambda q, *_: q)
    result = gpu_check.run_check("paged", lambda: gpu_check.check_paged(torch.device("cpu"), torch.float32, 16))
    assert not result.ok and "relative_error" in result.detail


def test_a_failing_check_is_recorded_and_does_not_stop_the_others(gpu_check):
    result = gpu_check.run_check("wrong", lambda: gpu_check.require(False, {"error": 2}))
    assert not result.ok and result.name == "wrong" and '{"error": 2}' in result.detail
    assert gpu_check.run_check("right", lambda: {"error": 0}).ok


@pytest.mark.gpu
def test_every_check_is_good_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    code, report = call(hide_gpu=False)
    assert code == 0, [check for check in report["checks"] if not check["ok"]]
