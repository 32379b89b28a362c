"""tools/search_schedule.py as its users run it: alone, under mpirun, interrupted, and with bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = Path(sys.executable).parent / "mpirun"
PROBLEM = {
    "version": 1,
    "nodes": 4,
    "pipelines": [
        {"name": "actor", "model": "actor", "placement": [0, 1, 2, 3], "microbatches": 4, "forward": 5, "backward": 10,
         "activation": 1.95},
        {"name": "critic.0", "model": "critic", "placement": [1, 0], "microbatches": 2, "forward": 4, "backward": 8,
         "activation": 2.0},
        {"name": "critic.1", "model": "critic", "placement": [3, 2], "microbatches": 2, "forward": 4, "backward": 8,
         "activation": 2.0},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    return tmp_path


def command(folder, *arguments):
    tool = [sys.executable, str(ROOT / "tools/search_schedule.py"), "--problem", str(folder / "problem.json")]
    return tool + ["--out", str(folder / "schedule.json"), *map(str, arguments)]


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def run(folder, *arguments):
    return subprocess.run(command(folder, *arguments), env=environment(), capture_output=True, text=True, timeout=240)


def test_search_writes_the_contract(folder):
    result = run(folder, "--time-limit", 60, "--seed", 1)
    assert result.returncode == 0, result.stderr
    raw = json.loads((folder / "schedule.json").read_text())
    assert raw["optimal"] and raw["makespan"] == raw["lower_bound"] < raw["serial_makespan"]
    assert raw["makespan"] == max(task["end"] for row in raw["tasks"] for task in row)
    assert "optimal" in result.stdout and result.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["problem.json", "schedule.json"]


def test_iterations_repeat_exactly(folder):
    tasks = []
    for _ in range(2):
        assert run(folder, "--iterations", 200_000, "--seed", 5, "--objective", "memory", "--force").returncode == 0
        tasks.append(json.loads((folder / "schedule.json").read_text())["tasks"])
    assert tasks[0] == tasks[1]


def test_existing_output_is_kept_unless_told(folder):
    assert run(folder, "--iterations", 1000).returncode == 0
    before = (folder / "schedule.json").read_bytes()
    refused = run(folder, "--iterations", 1000)
    assert refused.returncode == 2 and "--force" in refused.stderr and refused.stderr.count("\n") == 1
    assert (folder / "schedule.json").read_bytes() == before
    resumed = run(folder, "--iterations", 300_000, "--objective", "memory", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    old, new = json.loads(before), json.loads((folder / "schedule.json").read_text())
    assert (new["makespan"], new["peak_memory"]) <= (old["makespan"], old["peak_memory"])


def test_resume_refuses_a_schedule_of_another_problem(folder):
    assert run(folder, "--iterations", 1000).returncode == 0
    other = json.loads(json.dumps(PROBLEM))
    other["pipelines"][0]["microbatches"] = 8
    (folder / "problem.json").write_text(json.dumps(other))
    result = run(folder, "--iterations", 1000, "--resume")
    assert result.returncode == 2 and "microbatches 4, this run has 8" in result.stderr


@pytest.mark.parametrize(
    "change, arguments, message",
    [
        ({"nodes": 0}, ["--time-limit", 1], "nodes is 0"),
        ({"memory_cap": 1}, ["--time-limit", 1], "raise the cap"),
        ({}, [], "--time-limit SECONDS or --iterations N"),
        ({}, ["--time-limit", -1], "time_limit=-1.0"),
        ({}, ["--time-limit", 1, "--objective", "speed"], "invalid choice"),
        ({}, ["--time-limit", 1, "--problem", "/nowhere/problem.json"], "cannot read /nowhere/problem.json"),
        ({}, ["--time-limit", 1, "--out", "/nowhere/schedule.json"], "folder /nowhere does not exist"),
        ({}, ["--time-limit", 1, "--resume"], "schedule.json: No such file"),
    ],
)
def test_bad_input_exits_2_with_one_line(folder, change, arguments, message):
    (folder / "problem.json").write_text(json.dumps({**PROBLEM, **change}))
    result = run(folder, *arguments)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (folder / "schedule.json").exists()


def test_interrupt_keeps_the_best_so_far(folder):
    """A bound that cannot be met keeps the search going until Ctrl-C."""
    capped = {**PROBLEM, "memory_cap": 4}
    (folder / "problem.json").write_text(json.dumps(capped))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background job is started with Ctrl-C ignored, and its children inherit that: undo it here.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command(folder, "--time-limit", 200), env=environment(), preexec_fn=heed, **pipes)
    deadline = time.monotonic() + 120
    while not (folder / "schedule.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    raw = json.loads((folder / "schedule.json").read_text())
    assert raw["peak_memory"] <= 4 and len(raw["tasks"]) == 4


@pytest.mark.mpi
@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")
def test_two_mpi_ranks_search_together_and_repeat(folder):
    tasks = []
    for _ in range(2):
        launched = mpirun(folder, "--iterations", 200_000, "--seed", 2, "--objective", "memory", "--force")
        assert launched.returncode == 0, launched.stderr
        assert launched.stdout.count("written to") == 1
        raw = json.loads((folder / "schedule.json").read_text())
        assert raw["search"]["ranks"] == 2 and raw["optimal"]
        tasks.append(raw["tasks"])
    assert tasks[0] == tasks[1]
    refused = mpirun(folder, "--iterations", 1000)
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1


def mpirun(folder, *arguments):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    launch = [str(MPIRUN), "--oversubscribe", "-n", "2", *command(folder, *arguments)]
    return subprocess.run(launch, env=environment(**root), capture_output=True, text=True, timeout=280)
