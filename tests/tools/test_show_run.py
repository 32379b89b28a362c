"""The tools that lay a run's prediction beside it: the table that is printed and kept, and the picture."""

import json

import pytest
from testkit.finished_run import write_run
from testkit.programs import call_tool


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("shown") / "run")


def test_prints_and_keeps_the_table(run):
    shown = call_tool("show_forecast", run, "--skip", 2, "--spans").stdout
    assert "weights moved          0.100 s   0.100 s    0.0%" in shown
    assert "over 3 iterations" in shown and "   0 reshard      0.100 s   0.100 s   " in shown
    assert "swap-in" in shown, "the costs"
    kept = json.loads((run / "forecast.json").read_text())
    assert kept["iterations"] == [2, 3, 4] and kept["memory"] is None


@pytest.mark.parametrize("skip, message", [("9", "no iteration can be predicted"), ("x", "invalid int value")])
def test_bad_input_exits_2(run, skip, message):
    finished = call_tool("show_forecast", run, "--skip", skip)
    assert finished.returncode == 2 and message in finished.stderr


def test_draws_the_last_iteration(run, tmp_path):
    whole = call_tool("show_timeline", run, "--png", tmp_path / "both.png")
    measured = call_tool("show_timeline", run, "--png", tmp_path / "measured.png", "--measured-only")
    counts = [int(finished.stdout.split()[-2]) for finished in (whole, measured)]
    assert counts[0] == 2 * counts[1] and (tmp_path / "both.png").stat().st_size > 0
