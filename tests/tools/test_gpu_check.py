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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        import gpu_check
    return gpu_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rehearsed_on_the_cpu_attention_agrees_with_the_formula(gpu_check, dtype):
    device = torch.device("cpu")
    generation = gpu_check.generation
    assert set(generation.check_varlen(device, dtype)) == {"forward", "dq", "dk", "dv"}
    for block_tokens in (16, 256):
        assert generation.check_paged(device, dtype, block_tokens)["relative_error"] > 0
        assert generation.check_decode_attention(device, dtype, block_tokens)["relative_error"] > 0


def test_wrong_attention_is_found(gpu_check, monkeypatch):
    generation = gpu_check.generation
    for name, check in (("paged", generation.check_paged), ("decode", generation.check_decode_attention)):
        monkeypatch.setattr(generation, f"{name}_attention", lambda q, *_: q)
        result = gpu_check.run_check(name, lambda check=check: check(torch.device("cpu"), torch.float32, 16))
        assert not result.ok and "relative_error" in result.detail


def test_rehearsed_on_the_cpu_engines_agree(gpu_check, tmp_path):
    model, device = gpu_check.write_model(tmp_path / "tiny", gpu_check.TINY), torch.device("cpu")
    found = gpu_check.generation.check_engine(model, device, torch.float32, 16)
    assert found["equal_tokens"] == found["tokens"] and 0 < found["max_logprob_difference"] < 1e-4
    found = gpu_check.generation.check_graphs(model, device, torch.float32)
    assert found["equal_tokens"] == found["tokens"] and found["capture_seconds"] == 0


def test_speed_is_measured_on_a_tiny_shape(gpu_check, tmp_path):
    found = gpu_check.speed.measure(gpu_check.TINY, tmp_path / "tiny", torch.device("cpu"), 16, (1, 3))
    assert "graphs" not in found and found["data_sheet_bytes_per_second"] is None
    assert set(found["eager"]["decode"]) == {"1", "3"}
    for row in found["eager"]["decode"].values():
        assert row["tokens_per_second"] > 0 and 0 < row["copy_bandwidth_fraction"] < 1
    assert 0 < found["eager"]["prefill_gemm_fraction"] < 1
    json.dumps(found)


def test_a_shape_too_large_for_the_card_is_skipped_by_name(gpu_check, tmp_path, monkeypatch):
    speed = gpu_check.speed
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 << 30, 24 << 30))
    found = speed.measure(speed.SHAPES["8b"], tmp_path / "8b", torch.device("cuda"), 256, speed.BATCHES)
    assert set(found) == {"skipped"} and "16384 MiB are free" in found["skipped"]


def test_what_a_step_reads_and_computes(gpu_check, tmp_path):
    speed = gpu_check.speed
    specs = {}
    for size, shape in speed.SHAPES.items():
        (tmp_path / "config.json").write_text(json.dumps(shape))
        specs[size] = gpu_check.ModelSpec.from_config(tmp_path)
    small, large = specs["1b"], specs["8b"]
    assert 1.2e9 < small.parameters() < 1.3e9 and 8.0e9 < large.parameters() < 8.1e9
    assert speed.step_bytes(small, 0) == 2 * small.parameters()
    assert speed.step_bytes(large, 0) == 2 * (large.parameters() - 128256 * 4096)
    assert speed.step_bytes(large, 10) - speed.step_bytes(large, 0) == 10 * 32 * 2 * 8 * 128 * 2
    exact = 2 * (small.parameters() - small.embedding_parameters) * 16 * 512
    assert exact < speed.prefill_operations(small, 16, 512) < 1.1 * exact


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
