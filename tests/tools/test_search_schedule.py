"""tools/search_schedule.py as its users run it: alone, under mpirun, interrupted, resumed, and with bad input."""

import copy
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhfuse.base.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/search_schedule.py"
MPIRUN = Path(sys.executable).parent / "mpirun"
PROBLEM = {
    "version": 1,
    "nodes": 4,
    "pipelines": [
        {
            "name": "actor",
            "model": "actor",
            "placement": [0, 1, 2, 3],
            "microbatches": 4,
            "forward": 5,
            "backward": 10,
            "activation": 1.95,
        },
        {
            "name": "critic.0",
            "model": "critic",
            "placement": [1, 0],
            "microbatches": 2,
            "forward": 4,
            "backward": 8,
            "activation": 2.0,
        },
        {
            "name": "critic.1",
            "model": "critic",
            "placement": [3, 2],
            "microbatches": 2,
            "forward": 4,
            "backward": 8,
            "activation": 2.0,
        },
    ],
}
ENDLESS = {**PROBLEM, "memory_cap": 4}  # its latency bound cannot be met, so that a search goes on
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    return tmp_path


def write(folder, problem):
    (folder / "problem.json").write_text(json.dumps(problem))


def read(folder):
    return json.loads((folder / "schedule.json").read_text())


def options(folder, *arguments):
    return ["--problem", str(folder / "problem.json"), "--out", str(folder / "schedule.json"), *map(str, arguments)]


def command(folder, *arguments):
    return [sys.executable, str(TOOL), *options(folder, *arguments)]


def environment(**more):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **root, **more}


def run(folder, *arguments):
    return subprocess.run(command(folder, *arguments), env=environment(), capture_output=True, text=True, timeout=540)


def mpirun(folder, *arguments):
    launch = [str(MPIRUN), "--oversubscribe", "-n", "2", *command(folder, *arguments)]
    return subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=540)


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Run the program's main here; returns its exit code."""
    spec = importlib.util.spec_from_file_location("search_schedule", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def call(folder, *arguments):
        monkeypatch.setattr(sys, "argv", ["search_schedule.py", *options(folder, *arguments)])
        return tool.main()

    return call


def test_search_writes_the_contract(folder):
    result = run(folder, "--time-limit", 3600, "--seed", 1)
    assert result.returncode == 0, result.stderr
    raw = read(folder)
    assert raw["optimal"] and raw["makespan"] == raw["lower_bound"] < raw["serial_makespan"]
    assert raw["makespan"] == max(task["end"] for row in raw["tasks"] for task in row)
    assert "optimal" in result.stdout and f"written to {folder / 'schedule.json'}" in result.stdout
    assert "imports in" in result.stderr and "first schedule in" in result.stderr and "kernels ready" in result.stderr
    assert "bound" in result.stderr and "\r" not in result.stderr  # not a terminal: whole lines
    assert sorted(path.name for path in folder.iterdir()) == ["problem.json", "schedule.json"]


def test_iterations_repeat_exactly(folder, in_process):
    tasks = []
    for _ in range(2):
        assert in_process(folder, "--iterations", 200_000, "--seed", 5, "--objective", "memory", "--force") == 0
        tasks.append(read(folder)["tasks"])
    assert tasks[0] == tasks[1]


def test_latency_that_is_fast_enough_leaves_room_for_memory(folder, in_process):
    assert in_process(folder, "--iterations", 100_000, "--objective", "memory") == 0
    tight = read(folder)
    slow = 1.4 * tight["makespan"]
    assert in_process(folder, "--iterations", 100_000, "--objective", "memory", "--latency", slow, "--force") == 0
    loose = read(folder)
    assert loose["makespan"] <= slow and loose["peak_memory"] < tight["peak_memory"]


def test_memory_cap_is_in_the_file(folder, in_process):
    assert in_process(folder, "--iterations", 20_000, "--memory-cap", 6) == 0
    assert read(folder)["problem"]["memory_cap"] == 6 and read(folder)["peak_memory"] <= 6


def test_existing_output_is_kept_unless_told(folder, in_process, capsys):
    assert in_process(folder, "--iterations", 1000) == 0
    before = (folder / "schedule.json").read_bytes()
    with pytest.raises(InputError, match="exists; --force replaces it, --resume goes on"):
        in_process(folder, "--iterations", 1000)
    assert (folder / "schedule.json").read_bytes() == before
    assert in_process(folder, "--iterations", 100_000, "--objective", "memory", "--resume") == 0
    old, new = json.loads(before), read(folder)
    assert (new["makespan"], new["peak_memory"]) <= (old["makespan"], old["peak_memory"])
    assert new["search"]["runs"] == 2 and new["search"]["moves"] >= old["search"]["moves"]
    assert new["search"]["seconds"] > old["search"]["seconds"]
    assert f"going on from {folder / 'schedule.json'}" in capsys.readouterr().err


def test_resume_without_a_file_starts_afresh_and_says_so(folder, in_process, capsys):
    assert in_process(folder, "--iterations", 1000, "--resume") == 0
    assert "starting afresh" in capsys.readouterr().err and read(folder)["search"]["runs"] == 1


def test_resume_refuses_a_schedule_of_another_problem(folder, in_process):
    assert in_process(folder, "--iterations", 1000) == 0
    before = (folder / "schedule.json").read_bytes()
    for key, value, message in (
        ("microbatches", 8, "pipeline actor has microbatches 4, this run has 8"),
        ("placement", [3, 2, 1, 0], "pipeline actor has placement"),
        ("name", "policy", "has pipelines actor, critic.0, critic.1, this run has critic.0, critic.1, policy"),
        ("model", "policy", "pipeline actor has model actor, this run has policy"),
    ):
        other = copy.deepcopy(PROBLEM)
        other["pipelines"][0][key] = value
        write(folder, other)
        with pytest.raises(InputError, match=message):
            in_process(folder, "--iterations", 1000, "--resume")
    assert (folder / "schedule.json").read_bytes() == before


def test_resume_takes_a_schedule_made_for_other_times_and_says_so(folder, in_process, capsys):
    assert in_process(folder, "--iterations", 1000) == 0
    other = copy.deepcopy(PROBLEM)
    other["pipelines"][0]["forward"] = 6
    write(folder, other)
    assert in_process(folder, "--iterations", 1000, "--resume") == 0
    assert "made for pipeline actor with forward (5, 5, 5, 5), not (6, 6, 6, 6)" in capsys.readouterr().err
    assert read(folder)["problem"]["pipelines"][0]["forward"] == 6


def pipeline(**change):
    """PROBLEM with its actor changed."""
    return {"pipelines": [{**PROBLEM["pipelines"][0], **change}, *PROBLEM["pipelines"][1:]]}


@pytest.mark.parametrize(
    "change, arguments, message",
    [
        ({"nodes": 0}, [], r"problem.json: nodes is 0"),
        ({"nodes": 3}, [], r"problem.json: pipeline 'actor': placement names node 3, but nodes are 0..2"),
        ({"version": 2}, [], r"problem.json: version is 2; must be 1"),
        ({"nods": 4}, [], r"problem.json: unknown key 'nods'"),
        ({"memory_cap": [1, 2]}, [], r"problem.json: memory_cap has 2 entries for 4 nodes"),
        ({"memory_cap": 1}, [], r"problem.json: .* needs 2; the smallest feasible cap is 2"),
        ({"memory_cap": [9, 9, 2, 9], "static_memory": 1.5}, [], r"on node 2, .* feasible cap there is 3.5"),
        ({}, ["--memory-cap", 1.99], r"smallest feasible cap is 2"),
        ({}, ["--memory-cap", "nan"], r"memory_cap is nan"),
        (pipeline(forward=0), [], r"problem.json: pipeline 'actor': forward is 0; a positive number"),
        (pipeline(backward=[10, -1, 10, 10]), [], r"pipeline 'actor': backward is -1"),
        (pipeline(forward=float("nan")), [], r"problem.json: not valid JSON .NaN is no finite number"),
        (pipeline(activation=float("inf")), [], r"problem.json: not valid JSON .Infinity is no finite"),
        (pipeline(forward=[5, 5]), [], r"pipeline 'actor': forward has 2 entries for 4 stages"),
        *(({"nodes": bad}, [], r"problem.json: nodes is \d+; at most 10000") for bad in (10_001, 2**31, 2**63, 10**30)),
        *(({"transfer": bad}, [], "problem.json: transfer is .*; use a unit") for bad in (10**30, 1e-300)),
        *((pipeline(microbatches=bad), [], "problem.json: at most 500000 tasks .*") for bad in (100_000, 2**31, 2**63)),
        *((pipeline(activation=bad), [], "'actor': activation is .*; use a unit") for bad in (1e308, 5e-324)),
        (pipeline(weight_gradient=1, weight_activation=1e-308), [], "'actor': weight_activation is 1e-308; use a unit"),
        (pipeline(forward=10**400), [], "problem.json: not valid JSON .a whole number of 401 digits"),
        (pipeline(microbatches=0), [], r"pipelines\[0\].microbatches is 0"),
        (pipeline(model=7), [], r"pipelines\[0\].model is 7; must be a valid string"),
        (pipeline(name="critic.0"), [], r"problem.json: pipeline name 'critic.0' is used 2 times"),
        ({}, ["--time-limit", -1], r"time_limit=-1.0"),
        ({}, ["--objective", "speed"], r"argument --objective: invalid choice: 'speed'"),
        ({}, ["--objective", "memory", "--latency", 1], r"latency=1.0 is below the proved bound"),
        ({}, ["--latency", 500], r"latency=500.0 goes with objective='memory'"),
        ({}, ["--problem", "/nowhere/problem.json"], r"/nowhere/problem.json does not exist"),
        ({}, ["--out", "/nowhere/schedule.json"], r"folder /nowhere does not exist"),
        ({}, ["--out", "/"], r"--out / is a folder"),
        ({}, ["--out", "/proc/schedule.json"], r"cannot write /proc/schedule.json"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(folder, in_process, change, arguments, message):
    write(folder, {**PROBLEM, **change})
    with pytest.raises(InputError, match=message) as refused:
        in_process(folder, "--time-limit", 1, *arguments)
    assert "\n" not in str(refused.value)
    assert [path.name for path in folder.iterdir()] == ["problem.json"]


def test_a_search_needs_an_end_and_an_output_of_its_own(folder, in_process):
    with pytest.raises(InputError, match="--time-limit SECONDS or --iterations N"):
        in_process(folder)
    with pytest.raises(InputError, match="is the problem itself"):
        in_process(folder, "--time-limit", 1, "--out", folder / "problem.json", "--force")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "schedule.json: JSON nested more than"),
        ("{}", "version is missing; add it"),
        ('{"version": 2, "problem": {}, "tasks": []}', "version is 2; must be 1"),
        ("SEARCH", 'search: seconds is "long"; must be a finite number'),
    ],
)
def test_what_cannot_be_resumed_is_kept(folder, in_process, text, message):
    if text == "SEARCH":
        assert in_process(folder, "--iterations", 1000) == 0
        text = json.dumps({**read(folder), "search": {"seconds": "long"}})
    (folder / "schedule.json").write_text(text)
    with pytest.raises(InputError, match=message):
        in_process(folder, "--iterations", 1000, "--resume")
    assert (folder / "schedule.json").read_text() == text


def test_bad_input_exits_2_with_one_line(folder):
    result = run(folder, "--time-limit", 1, "--out", "/nowhere/schedule.json")
    assert result.returncode == 2 and result.stderr.startswith("error: --out") and result.stderr.count("\n") == 1


def started(folder, launch):
    """The process, once its first schedule is on disk and every rank of it heeds signals."""
    # A shell's background job is started with Ctrl-C ignored, and its children inherit that: undo it here.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(launch, env=environment(), preexec_fn=heed, start_new_session=True, **pipes)
    deadline = time.monotonic() + 540
    while process.poll() is None and not ((folder / "schedule.json").exists() and all(map(heeds, ranks_of(process)))):
        assert time.monotonic() < deadline, "no schedule yet"
        time.sleep(0.05)
    return process


def heeds(pid):
    """Whether the process has a handler of its own for SIGUSR1, which only the search sets."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def ended(process):
    """Its output, once no search of its session is left."""
    try:
        return process.communicate(timeout=540)
    finally:
        deadline = time.monotonic() + 540
        while ranks_of(process) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = ranks_of(process)
        for child in left:
            os.kill(child, signal.SIGKILL)
        assert not left


def ranks_of(process):
    """The searches in the session that `process` leads, in order of start."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session == process.pid and words[1:2] == [str(TOOL).encode()]:
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize("number, code, name", [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_signals_keep_the_best_so_far(folder, number, code, name):
    write(folder, ENDLESS)
    process = started(folder, command(folder, "--time-limit", 3600))
    process.send_signal(number)
    _, stderr = ended(process)
    assert process.returncode == code and f"stopped by {name} after" in stderr and "go on with --resume" in stderr
    assert "Traceback" not in stderr
    assert read(folder)["peak_memory"] <= 4 and len(read(folder)["tasks"]) == 4
    assert sorted(path.name for path in folder.iterdir()) == ["problem.json", "schedule.json"]


@pytest.mark.mpi
@needs_mpi
def test_two_mpi_ranks_search_together_and_repeat(folder):
    tasks = []
    for _ in range(2):
        launched = mpirun(folder, "--iterations", 200_000, "--seed", 2, "--objective", "memory", "--force")
        assert launched.returncode == 0, launched.stderr
        assert launched.stdout.count("written to") == 1 and launched.stderr.count("(2 ranks)") == 1
        assert read(folder)["search"]["ranks"] == 2 and read(folder)["optimal"]
        tasks.append(read(folder)["tasks"])
    assert tasks[0] == tasks[1]


@pytest.mark.mpi
@needs_mpi
def test_bad_input_under_mpirun_is_said_once(folder):
    write(folder, {**PROBLEM, "memory_cap": 1})
    refused = mpirun(folder, "--time-limit", 5)
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
    assert refused.stderr.count("smallest feasible cap is 2") == 1 and "Traceback" not in refused.stderr


@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("whom", ["mpirun", "one rank"])
def test_a_signal_ends_all_ranks(folder, whom):
    """mpirun passes SIGUSR1 on; a signal to one rank alone must end the others too."""
    write(folder, ENDLESS)
    launch = [str(MPIRUN), "--oversubscribe", "-n", "2", *command(folder, "--time-limit", 3600)]
    process = started(folder, launch)
    os.kill(process.pid if whom == "mpirun" else ranks_of(process)[-1], signal.SIGUSR1)
    _, stderr = ended(process)
    assert process.returncode == 138 and stderr.count("stopped by SIGUSR1 after") == 1 and "Traceback" not in stderr
    assert read(folder)["peak_memory"] <= 4


@pytest.mark.mpi
@needs_mpi
def test_a_killed_rank_leaves_a_whole_file(folder):
    write(folder, ENDLESS)
    launch = [str(MPIRUN), "--oversubscribe", "-n", "2", *command(folder, "--time-limit", 3600)]
    process = started(folder, launch)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    ended(process)
    assert process.returncode != 0
    assert read(folder)["peak_memory"] <= 4 and len(read(folder)["tasks"]) == 4


@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_launcher_makes_a_clean_end_of_what_mpirun_would_kill(folder, number, code):
    write(folder, ENDLESS)
    script = str(ROOT / "scripts/search_schedule.sh")
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    launch = ["env", f"PATH={folders}", "bash", script, "2", *options(folder, "--time-limit", 3600)]
    process = started(folder, launch)
    process.send_signal(number)
    _, stderr = ended(process)
    assert process.returncode == code and stderr.count("go on with --resume") == 1
    assert read(folder)["peak_memory"] <= 4
