"""The table of predicted and measured phases, printed from a run's metrics and kept beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfuse.monitor.report.forecast_table import PHASES, forecast_key

ROOT = Path(__file__).resolve().parents[2]


def show(*arguments):
    command = [sys.executable, str(ROOT / "tools/show_forecast.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


@pytest.fixture
def run(tmp_path):
    lines = [{"iteration": 0} | {f"timing_s/{phase}": 1.0 for phase in PHASES}]
    for iteration in (1, 2):
        line = {"iteration": iteration} | {f"timing_s/{phase}": 2.0 for phase in PHASES}
        line |= {forecast_key(phase, blind): 2.0 + 0.2 * iteration for phase in PHASES for blind in (False, True)}
        lines.append(line)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def test_prints_and_keeps_the_table(run):
    finished = show(run)
    assert finished.returncode == 0, finished.stderr
    assert "generation             2.000 s   2.300 s   15.0%" in finished.stdout
    assert "over 2 iterations" in finished.stdout
    kept = json.loads((run / "forecast.json").read_text())
    assert kept["iterations"] == [1, 2] and kept["mean_error"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    "arguments, message",
    [(["--skip", "3"], "no iteration holds a forecast"), (["--skip", "x"], "invalid int value")],
)
def test_bad_input_exits_2(run, arguments, message):
    finished = show(run, *arguments)
    assert finished.returncode == 2 and message in finished.stderr and "Traceback" not in finished.stderr
