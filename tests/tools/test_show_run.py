"""The tools that lay a run's prediction beside it: the table that is printed and kept, and the picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.finished_run import write_run

ROOT = Path(__file__).resolve().parents[2]


def show(tool, *arguments):
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("shown") / "run")


def test_prints_and_keeps_the_table(run):
    finished = show("show_forecast.py", run, "--skip", "2", "--spans")
    assert finished.returncode == 0, finished.stderr
    assert "weights moved          0.100 s   0.100 s    0.0%" in finished.stdout
    assert (
        "over 3 iterations" in finished.stdout and "   0 reshard      0.100 s   0.100 s   +0.000 s" in finished.stdout
    )
    assert "swap-in" in finished.stdout, "the costs"
    kept = json.loads((run / "forecast.json").read_text())
    assert kept["iterations"] == [2, 3, 4] and kept["memory"] is None


@pytest.mark.parametrize(
    "arguments, message", [(["--skip", "9"], "no iteration can be predicted"), (["--skip", "x"], "invalid int value")]
)
def test_bad_input_exits_2(run, arguments, message):
    finished = show("show_forecast.py", run, *arguments)
    assert finished.returncode == 2 and message in finished.stderr and "Traceback" not in finished.stderr


def test_draws_the_last_iteration(run, tmp_path):
    whole = show("show_timeline.py", run, "--png", tmp_path / "both.png")
    assert whole.returncode == 0, whole.stderr
    measured = show("show_timeline.py", run, "--png", tmp_path / "measured.png", "--measured-only")
    counts = [int(finished.stdout.split()[-2]) for finished in (whole, measured)]
    assert counts[0] == 2 * counts[1] and (tmp_path / "both.png").stat().st_size > 0
