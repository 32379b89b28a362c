"""Every benchmark program in small, as its users run it: its figures are in its file; bad input is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "../shared/data/stories260K-hf"
TRL_PYTHON = os.environ.get("RLHFUSE_TRL_PYTHON", "")
TAIL = (2, 3, 2, 4, 2, 3, 40, 2, 5, 2, 3, 2) * 4  # output tokens of the trace's requests


def run(program, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / program), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv"
    rows = [f"{20 + 7 * i},{output}" for i, output in enumerate(TAIL)]
    file.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return file


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(2000)])


@pytest.mark.parametrize(
    "program, arguments, figures",
    [
        ("schedule_search.py", "table --ranks 1", "at_bound memory_below_published"),
        ("schedule_search.py", "growth --ranks 1", "4x4.accepted_move 8x6.rss"),
        ("schedule_search.py", "seeds --ranks 1 --rows 4", "8/8.x8.as_published"),
        ("schedule_search.py", "curve --ranks 1 --rows 1", "8/4.x8.whole.memory 8/4.x8.split.makespan"),
        ("paper_settings.py", "", "p.gen_infer.within"),
        ("planner_speed.py", "", "8.cpu_seconds 8.best 8.tables 8.drafted 8.priced"),
        ("planner_regret.py", "--settings balanced --measured MEASURED", "balanced.analytic.chosen_over_best"),
        ("real_plans.py", "", "T4.published_over_best T2.heuristic_over_searched regret T2.walks_that_fit"),
        ("inter_stage.py", "--sizes 1:2 --lengths TRACE", "1to2.speedup 1to2.mean_error 1to2.chosen_over_best"),
        slow("generation.py", "--threads 1 --trace TRACE --plot PLOT", "a.over_transformers d.batch16.outside e.gemm"),
        slow("intra_stage.py", "--sizes 2.5:1 --microbatches 2", "2_5to1_m2.speedup 2_5to1_m2.instruction"),
        slow("iteration_prediction.py", "--iterations 4", "mean_error train.error"),
        slow("iteration_prediction.py", "--iterations 4 --reward 50", "step.error reward.waited"),
        slow("planner_regret.py", "--lengths TRACE", "tail.profile.chosen_over_best balanced.analytic.mean_error"),
        slow("kills.py", "", "lost processes_left kills"),
        slow("learning.py", "--tasks sums --seeds 1", "sums.least_rise"),
        slow("endurance.py", "--iterations 7", "memory_growth files_changed cpu_slope"),
    ],
)
def test_quick_run(program, arguments, figures, tmp_path, trace):
    measured = str(ROOT / "benchmarks" / "results" / "planner_regret.json")
    arguments = arguments.replace("TRACE", str(trace)).replace("MEASURED", measured)
    words = arguments.replace("PLOT", str(tmp_path / "plot.png")).split()
    finished = run(program, *words, "--quick", "--out", tmp_path / "out.json")
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["quick"] and result["tables"] and set(figures.split()) <= set(result["figures"])
    assert "PLOT" not in arguments or (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not MODEL.is_dir(), reason="stories260K is not beside the repository")
@pytest.mark.parametrize("program", ["learning.py", "end_to_end.py", "speculation.py"])
def test_quick_run_on_the_story_model(program, tmp_path):
    pytest.importorskip("vaderSentiment", reason="the sentiment reward needs the vaderSentiment package")
    words = ["--seeds", "1", "--tasks", "grpo,ppo"] if program == "learning.py" else ["--threads", "1"]
    if program == "end_to_end.py":
        if not TRL_PYTHON:
            pytest.skip("RLHFUSE_TRL_PYTHON names no Python of an environment with TRL")
        words = ["--trl-python", TRL_PYTHON]
    finished = run(program, "--quick", *words, "--out", tmp_path / "out.json")
    assert finished.returncode == 0, finished.stderr
    assert {"reached", "ratio", "guess"} & set(json.loads((tmp_path / "out.json").read_text())["figures"])


@pytest.mark.mpi
def test_a_search_on_two_ranks(tmp_path):
    pytest.importorskip("mpi4py", reason="needs pip install rlhfuse[mpi]")
    finished = run("schedule_search.py", "table", "--quick", "--rows", 4, "--out", tmp_path / "out.json")
    assert finished.returncode == 0, finished.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())["facts"]["rows"]
    assert row["makespan"] == row["lower_bound"] == [225]


@pytest.mark.parametrize(
    "program, arguments, message",
    [
        ("schedule_search.py", "table --rows 13", "'13' is not a row; give numbers from 1 to 12, or all"),
        ("schedule_search.py", "growth --sizes 8by6", "'8by6' is not of the form NODESxMICROBATCHES"),
        ("generation.py", "--cases A,X", "'X' is not a case; give some of A,B,C,D,E,F"),
        ("generation.py", "--vllm-python nowhere", "--vllm-python nowhere is not there; run benchmarks/setup_peers.sh"),
        ("inter_stage.py", "--lengths nowhere.csv", "nowhere.csv does not exist"),
        ("inter_stage.py", "--rounds 0", "0 is not at least 1"),
        ("planner_speed.py", "--sizes 8,9", "'9' is unknown; give some of 8, 64, 256, 1024"),
        ("planner_regret.py", "--rounds 6 --settings balanced", "--rounds 6: rounds share 5 batches; give at most as"),
        ("planner_regret.py", "--settings balanced --measured nowhere.json", "nowhere.json"),
        ("planner_regret.py", "--lengths nowhere.csv", "nowhere.csv does not exist"),
        ("intra_stage.py", "--microbatches 2,1", "'1' is not a number of at least 2"),
        ("learning.py", "--model nowhere", "holds no model; give --model"),
        ("endurance.py", "--iterations 12", "--iterations 12: 20 are left out, give 24 or more"),
        ("iteration_prediction.py", "--iterations 2", "--iterations 2: the first 2 are left out; give some more"),
    ],
)
def test_bad_input_exits_2(program, arguments, message):
    finished = run(program, *arguments.split())
    assert finished.returncode == 2 and message in finished.stderr and "Traceback" not in finished.stderr
