"""The benchmark of endurance: its figures, what it calls grown, the training that it starts, bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

from endurance import CPU, Look, RankLife, Slope, cpu_of, goals, main, slopes_of  # noqa: E402

from rlhfuse.errors import InputError  # noqa: E402


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/endurance.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


def test_a_slope_is_that_of_the_line_and_its_error_the_textbooks():
    x = np.arange(10, 110)
    exact = Slope.of(dict(zip(x, 2 + 0.01 * x)))
    assert (exact.mean, exact.percent) == pytest.approx((2.595, 100 / 2.595))
    assert exact.standard_error == pytest.approx(0, abs=1e-9)
    y = 3 + 0.002 * x + np.random.default_rng(0).normal(0, 0.3, len(x))
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    found = Slope.of(dict(zip(x, y)))
    assert found.percent == pytest.approx(1e4 * slope / y.mean())
    assert found.standard_error == pytest.approx(1e4 * np.sqrt(covariance[0, 0]) / y.mean())


def test_at_equal_tokens_a_slope_is_free_of_them():
    rng = np.random.default_rng(1)
    tokens = {i: 1000 * 0.98**i + rng.uniform(0, 50) for i in range(100)}
    found = Slope.of({i: 1 + 0.002 * count for i, count in tokens.items()}, tokens)
    assert (found.percent, found.standard_error) == pytest.approx((0, 0), abs=1e-6)
    slower = Slope.of({i: 1 + 0.002 * count + 0.003 * i for i, count in tokens.items()}, tokens)
    assert slower.percent == pytest.approx(30 / slower.mean)
    slope = Slope.of({i: 2 + 0.01 * i for i in range(9)}, dict.fromkeys(range(9), 7))
    assert slope.percent == pytest.approx(1 / 0.0204)


def life(memory=lambda i: 1000, files=lambda i: 7, threads=lambda i: 3):
    return RankLife.of(1, [Look(i, 1, memory(i), files(i), threads(i), 0.0) for i in range(10, 60)])


def test_what_is_called_grown():
    flat = {CPU: Slope(1.0, 3.0, 2.0)}
    assert all(one["reached"] for one in goals([life()], flat))
    for figure, grown in enumerate(
        (
            [life(), life(memory=lambda i: 1000 + 2 * i)],
            [life(files=lambda i: 7 + i // 20)],
            [life(threads=lambda i: i)],
        )
    ):
        assert [one["reached"] for one in goals(grown, flat)] == [place != figure for place in range(4)]
    assert not goals([life()], {CPU: Slope(1.0, 5.0, 2.0)})[3]["reached"]


def test_a_file_that_is_open_for_a_moment_is_no_leak():
    assert life(files=lambda i: 7 + (i % 3 == 0)) == life()


def test_cpu_time_is_that_of_all_ranks_between_two_looks():
    spent = {(0, 0): 5.0, (0, 1): 6.0, (1, 0): 7.0, (1, 1): 9.0, (2, 0): 8.0, (3, 0): 9.0, (3, 1): 12.0}
    assert cpu_of([Look(i, rank, 0, 0, 0, seconds) for (i, rank), seconds in spent.items()]) == {1: 5.0}


def test_slopes_are_of_iterations_and_of_generated_tokens():
    rows = [{"iteration": i, "timing_s/step": 2.0 + i, "lengths/output": [3, 5]} for i in range(5, 15)]
    found = slopes_of(rows, {i: 4.0 for i in range(15)})
    assert {name: one.mean for name, one in found.items()} == pytest.approx(
        {"iteration": 11.5, "generated token": 11.5 / 8, "iteration at equal tokens": 11.5, CPU: 4.0}
    )
    percents = [one.percent for one in found.values()]
    assert percents == pytest.approx([100 / 0.115, 100 / 0.115, 100 / 0.115, 0], abs=1e-6)


@pytest.mark.slow  # a training on four ranks
@pytest.mark.timeout(2000)
def test_quick_run_looks_at_all_ranks(tmp_path):
    out, samples = tmp_path / "out.json", tmp_path / "samples.csv"
    finished = run("--quick", "--iterations", 7, "--samples", samples, "--out", out, "--run-dir", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert json.loads(out.read_text()) == result and result["goals"] == [] and result["left_out"] == 1
    assert [one["rank"] for one in result["ranks"]] == [0, 1, 2, 3]
    assert all(one["memory_most_bytes"] > 10**8 and one["files_end"] > 10 for one in result["ranks"])
    lines = samples.read_text().splitlines()
    assert lines[0] == "iteration,rank,resident_bytes,files,threads,cpu_seconds"
    assert {line[0] for line in lines[1:]} >= set("123")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--iterations", 12), "--iterations 12: 10 are left out, give 14 or more"),
        (("--run-dir", ROOT), "exists; give another name"),
        (("--samples", "/nowhere/samples.csv"), "cannot write /nowhere/samples.csv: No such file or directory"),
    ],
)
def test_bad_input(arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["endurance.py", *map(str, arguments)])
    with pytest.raises(InputError) as caught:
        main()
    assert message in str(caught.value) and "\n" not in str(caught.value)
