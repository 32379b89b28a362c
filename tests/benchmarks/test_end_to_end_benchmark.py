"""The end-to-end benchmark: its figures by hand, what it refuses, and a small run where TRL's environment is given."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRL_PYTHON = os.environ.get("RLHFUSE_TRL_PYTHON", "")

import end_to_end  # noqa: E402
import stories_runs  # noqa: E402
from end_to_end import OWN, TRL, Speed  # noqa: E402


def speed(engine, *seconds):
    return Speed(engine, "2 processes x 1 thread", list(seconds), 64, [0.5, 0.9], 64.0, 30.0, {})


def test_the_ratio_is_of_medians_and_its_ends_of_rounds():
    found = [speed(OWN, 0.1, 0.2, 0.9), speed(TRL, 0.4), speed(TRL, 0.8), speed(OWN, 0.1)]
    assert found[0].samples_per_second == 320
    ratio = end_to_end.ratio_of(found)  # 320 and 640 against 160 and 80
    assert ratio == {"ratio": 4.0, "least": 2.0, "most": 8.0}
    page = end_to_end.markdown(found, ratio)
    assert "| rlhfuse | 2 processes x 1 thread | 480.0 | 320.0 | 640.0 | 64.0 |" in page and "4.00 x" in page


def test_iterations_are_counted_with_what_follows_the_step():
    assert stories_runs.seconds_of([{"timing_s/step": 1.0, "timing_s/books": 0.5}]) == [1.5]


def test_ways_to_take_two_cores():
    assert [str(way) for way in end_to_end.WAYS] == ["1 process x 2 threads", "2 processes x 1 thread"]
    assert all(way.processes * way.threads == stories_runs.RANKS for way in end_to_end.WAYS)


def test_a_missing_environment_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", "--trl-python", "nowhere/python"])
    with pytest.raises(end_to_end.InputError, match="--trl-python nowhere/python is not there; run benchmarks/setup"):
        end_to_end.parse_arguments()


def test_a_program_that_fails_is_heard_and_ended():
    with pytest.raises(RuntimeError, match="(?s)ended with code 3.*the reason"):
        stories_runs.run_program_of([sys.executable, "-c", "print('the reason'); exit(3)"], threads=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TRL_PYTHON, reason="RLHFUSE_TRL_PYTHON names no Python of an environment with TRL")
def test_a_small_run_of_both(tmp_path):
    out = tmp_path / "speed.json"
    command = [sys.executable, str(ROOT / "benchmarks/end_to_end.py"), "--quick", "--trl-python", TRL_PYTHON]
    finished = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=3600)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(out.read_text())
    assert [one["engine"] for one in result["runs"]] == [OWN, TRL] and result["goal"]["reached"] is None
    assert set(result["trial"]) == {str(way) for way in end_to_end.WAYS}
    for one in result["runs"]:
        assert len(one["iteration_seconds"]) == 2 and one["samples"] == 64 and one["tokens"] > 60
