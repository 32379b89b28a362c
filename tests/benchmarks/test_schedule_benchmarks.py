"""The schedule benchmarks as their users run them, for a second each: output, bad input, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmark_run import check_refused, command, environment, run

MPIRUN = Path(sys.executable).parent / "mpirun"


def result_of(finished):
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("\n") == 1, "stdout holds one JSON object"
    return json.loads(finished.stdout)


def test_table_is_written_and_shown(tmp_path):
    arguments = ("--ranks", 1, "--rows", "4,1", "--seconds", 0.5, "--seeds", 1)
    finished = run("schedule_table.py", *arguments, "--out", tmp_path / "table.json")
    result = result_of(finished)
    assert json.loads((tmp_path / "table.json").read_text()) == result
    assert [row["setting"] for row in result["rows"]] == ["8/4 x8", "8/8 x8"]
    first, second = result["rows"]
    assert (first["serial"], first["one_f_one_b_plus"], first["greedy"], first["lower_bound"]) == (309, 282, 239, 225)
    assert first["lower_bound"] <= first["makespan"] <= first["runs"][0]["improvements"][0][1]
    assert first["memory"] >= first["memory_lower_bound"]
    assert second["makespan"] == 225
    assert result["summary"]["rows"] == 2
    for title in ("Latency", "Peak activation memory"):
        assert title in finished.stderr


def test_growth_measures_and_plots(tmp_path):
    arguments = ("--ranks", 1, "--sizes", "8x6,4x4", "--seconds", 0.5)
    result = result_of(run("schedule_growth.py", *arguments, "--plot", tmp_path / "growth.png"))
    assert [row["operations"] for row in result["rows"]] == [64, 192]
    for row in result["rows"]:
        assert row["lower_bound"] <= row["makespan"] and row["peak_rss_bytes"] > 10**7
        assert 0 < row["tried_move_microseconds"] < row["accepted_move_microseconds"]
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_give_median_and_worst():
    result = result_of(run("schedule_seeds.py", "--ranks", 1, "--rows", "4", "--seconds", 0.5, "--seeds", 3))
    (row,) = result["rows"]
    assert [seed["seed"] for seed in row["seeds"]] == [1, 2, 3]
    memory = sorted(seed["peak_memory"] for seed in row["seeds"])
    assert (row["median"]["peak_memory"], row["worst"]["peak_memory"]) == (memory[1], memory[2])


@pytest.mark.parametrize(
    "program, arguments, message",
    [
        ("schedule_table.py", ["--rows", "13"], "'13' is not a row; give numbers from 1 to 12"),
        ("schedule_table.py", ["--seconds", "0"], "0 is not above 0"),
        ("schedule_growth.py", ["--sizes", "8by6"], "'8by6' is not of the form NODESxMICROBATCHES"),
    ],
)
def test_bad_input_exits_2(program, arguments, message):
    check_refused(message, program, *arguments)


@pytest.mark.mpi
@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")
def test_interrupt_ends_all_ranks():
    # A shell's background job is started with Ctrl-C ignored, and its children inherit that: undo it here.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    arguments = ("--ranks", 2, "--rows", 12, "--seconds", 3600)
    process = subprocess.Popen(
        command("schedule_table.py", *arguments), env=environment(), preexec_fn=heed, stdout=-1, stderr=-1, text=True
    )
    ranks = []
    deadline = time.monotonic() + 540
    while len(ranks) < 3 and time.monotonic() < deadline:  # mpirun and two ranks
        time.sleep(0.2)
        ranks = psutil.Process(process.pid).children(recursive=True)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=540)
    assert process.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    _, alive = psutil.wait_procs(ranks, timeout=540)
    assert len(ranks) >= 3 and not alive
