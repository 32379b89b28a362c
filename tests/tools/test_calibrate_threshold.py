"""tools/calibrate_threshold.py as a program: the file it writes, the same for the same seed, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_plan import ROOT, run_yaml  # noqa: F401  (a fixture)

TRACE = ROOT / "../shared/data/traces/azure2023_conv.csv"


def program(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools/calibrate_threshold.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120)


@pytest.fixture
def lengths_csv(tmp_path: Path) -> str:
    rows = [f"{10 + i % 50},{5 + (i * i) % 37 + (220 if i % 20 == 0 else 0)}" for i in range(300)]
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return str(tmp_path / "lengths.csv")


def test_writes_threshold_json_and_a_plot(run_yaml, lengths_csv, tmp_path):  # noqa: F811
    out, plot = tmp_path / "threshold.json", tmp_path / "curve.png"
    args = ("--config", run_yaml, "--lengths", lengths_csv, "--hardware", "cpu")
    done = program(*args, "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    raw = json.loads(out.read_text())
    assert raw["instances"] == 4 and raw["samples"] == 64 and len(raw["sweep"]) == 20
    assert raw["fused_seconds"] == min(point["fused_seconds"] for point in raw["sweep"])
    assert f"R_t = {raw['threshold']}" in done.stdout and "p99.9/p50" in done.stdout
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.tmp"))
    again = program(*args, "--out", str(tmp_path / "again.json"))
    assert again.returncode == 0 and json.loads((tmp_path / "again.json").read_text()) == raw


def test_options(run_yaml, lengths_csv, tmp_path):  # noqa: F811
    out = tmp_path / "threshold.json"
    args = ("--config", run_yaml, "--lengths", f"{lengths_csv}:prompt_tokens", "--prompt-column", "output_tokens")
    done = program(*args, "--out", str(out), "--instances", "8", "rollout.max_response_tokens=20")
    assert done.returncode == 0, done.stderr
    raw = json.loads(out.read_text())
    assert raw["instances"] == 8 and raw["lengths"]["max"] == 20 and raw["lengths"]["clipped"] > 0


def test_bad_input_exits_2_and_leaves_no_file(run_yaml, lengths_csv, tmp_path):  # noqa: F811
    out = tmp_path / "threshold.json"
    base = ("--config", run_yaml, "--lengths", lengths_csv, "--out", str(out))
    for args, message in (
        (("--instances", "0"), "--instances 0"),
        (("--hardware", "abacus"), "hardware 'abacus' is not known"),
        (("--cost", "none.json"), "cost file none.json does not exist"),
        (("--prompt-column", "x"), "no column 'x'; found: prompt_tokens, output_tokens"),
    ):
        done = program(*base, *args)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
        assert not out.exists()
    out.write_text("mine")
    assert program(*base).returncode == 2 and out.read_text() == "mine"
    assert program(*base, "--force").returncode == 0 and json.loads(out.read_text())


def test_a_real_trace(run_yaml, tmp_path):  # noqa: F811
    if not TRACE.exists():
        pytest.skip("shared/data/traces is not beside this checkout")
    done = program("--config", run_yaml, "--lengths", str(TRACE), "--out", str(tmp_path / "t.json"))
    assert done.returncode == 0 and "p99.9/p50" in done.stdout
