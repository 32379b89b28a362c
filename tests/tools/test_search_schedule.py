"""tools/search_schedule.py as its users run it: alone, under mpirun, interrupted, resumed, and with bad input."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from testkit.paths import ROOT
from testkit.programs import MPIRUN, TIMEOUT_SECONDS, call_tool, eventually

TOOL = ROOT / "tools/search_schedule.py"
ACTOR = dict(name="actor", model="actor", placement=[0, 1, 2, 3], microbatches=4, forward=5, backward=10)
CRITIC = dict(model="critic", microbatches=2, forward=4, backward=8, activation=2)
CRITICS = [{**CRITIC, "name": f"critic.{i}", "placement": [2 * i + 1, 2 * i]} for i in (0, 1)]
PROBLEM = {"version": 1, "nodes": 4, "pipelines": [{**ACTOR, "activation": 1.95}, *CRITICS]}
ENDLESS = {**PROBLEM, "memory_cap": 4}  # its latency bound cannot be met, so that a search goes on


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    return tmp_path


def write(folder, problem):
    (folder / "problem.json").write_text(json.dumps(problem))


def read(folder):
    return json.loads((folder / "schedule.json").read_text())


def options(folder, *arguments):
    return ["--problem", folder / "problem.json", "--out", folder / "schedule.json", *arguments]


def run(folder, *arguments):
    """What it said on stderr, having ended well."""
    done = call_tool("search_schedule", *options(folder, *arguments))
    assert done.returncode == 0, done.stderr
    return done.stderr


def refused(folder, *arguments):
    done = call_tool("search_schedule", *options(folder, *arguments))
    assert done.returncode == 2 and done.stderr.rpartition("error: ")[2].count("\n") == 1, done
    return done.stderr


def test_search_writes_the_contract(programs, folder):
    result = programs.tool("search_schedule", *options(folder, "--time-limit", 3600, "--seed", 1))
    assert result.returncode == 0, result.stderr
    raw = read(folder)
    assert raw["optimal"] and raw["makespan"] == raw["lower_bound"] < raw["serial_makespan"]
    assert raw["makespan"] == max(task["end"] for row in raw["tasks"] for task in row)
    assert "optimal" in result.stdout and f"written to {folder / 'schedule.json'}" in result.stdout
    assert "imports in" in result.stderr and "first schedule in" in result.stderr and "kernels ready" in result.stderr
    assert "bound" in result.stderr and "\r" not in result.stderr  # not a terminal: whole lines
    assert sorted(path.name for path in folder.iterdir()) == ["problem.json", "schedule.json"]


def test_latency_that_is_fast_enough_leaves_room_for_memory(folder):
    run(folder, "--iterations", 100_000, "--objective", "memory")
    tight = read(folder)
    slow = 1.4 * tight["makespan"]
    run(folder, "--iterations", 100_000, "--objective", "memory", "--latency", slow, "--force")
    loose = read(folder)
    assert loose["makespan"] <= slow and loose["peak_memory"] < tight["peak_memory"]


def test_memory_cap_is_in_the_file(folder):
    run(folder, "--iterations", 20_000, "--memory-cap", 6)
    cap = read(folder)["problem"]["memory_cap"]
    assert cap == 6 and isinstance(cap, int) and read(folder)["peak_memory"] <= 6  # as a problem's file says it


def test_existing_output_is_kept_unless_told(folder):
    told = run(folder, "--iterations", 1000, "--resume")
    assert "starting afresh" in told and read(folder)["search"]["runs"] == 1
    before = (folder / "schedule.json").read_bytes()
    assert "exists; --force replaces it, --resume goes on" in refused(folder, "--iterations", 1000)
    assert (folder / "schedule.json").read_bytes() == before
    told = run(folder, "--iterations", 100_000, "--objective", "memory", "--resume")
    old, new = json.loads(before), read(folder)
    assert (new["makespan"], new["peak_memory"]) <= (old["makespan"], old["peak_memory"])
    assert new["search"]["runs"] == 2 and new["search"]["moves"] >= old["search"]["moves"]
    assert new["search"]["seconds"] > old["search"]["seconds"]
    assert f"going on from {folder / 'schedule.json'}" in told


def pipeline(**change):
    """PROBLEM with its actor changed."""
    return {**PROBLEM, "pipelines": [{**PROBLEM["pipelines"][0], **change}, *CRITICS]}


def test_resume_takes_a_schedule_made_for_other_times_and_refuses_one_of_another_problem(folder):
    run(folder, "--iterations", 1000)
    before = (folder / "schedule.json").read_bytes()
    for change, message in (
        ({"microbatches": 8}, "pipeline actor has microbatches 4, this run has 8"),
        ({"placement": [3, 2, 1, 0]}, "pipeline actor has placement"),
        ({"name": "policy"}, "has pipelines actor, critic.0, critic.1, this run has critic.0, critic.1, policy"),
        ({"model": "policy"}, "pipeline actor has model actor, this run has policy"),
    ):
        write(folder, pipeline(**change))
        assert message in refused(folder, "--iterations", 1000, "--resume")
    assert (folder / "schedule.json").read_bytes() == before
    write(folder, pipeline(forward=6))
    told = run(folder, "--iterations", 1000, "--resume")
    assert "made for pipeline actor with forward (5, 5, 5, 5), not (6, 6, 6, 6)" in told
    assert read(folder)["problem"]["pipelines"][0]["forward"] == 6


@pytest.mark.parametrize(
    "change, arguments, message",
    [
        ({"memory_cap": 1}, [], r"problem.json: .* needs 2; the smallest feasible cap is 2"),
        ({"memory_cap": [9, 9, 2, 9], "static_memory": 1.5}, [], r"on node 2, .* feasible cap there is 3.5"),
        ({}, ["--memory-cap", 1.99], r"smallest feasible cap is 2"),
        ({}, ["--memory-cap", "nan"], r"memory_cap is nan"),
        (pipeline(forward=0), [], r"problem.json: pipeline 'actor': forward is 0; a positive number"),
        (pipeline(forward=float("nan")), [], r"problem.json: not valid JSON .NaN is no finite number"),
        *(({"nodes": bad}, [], r"problem.json: nodes is \d+; at most 10000") for bad in (10_001, 2**31, 2**63, 10**30)),
        *(({"transfer": bad}, [], "problem.json: transfer is .*; use a unit") for bad in (10**30, 1e-300)),
        *((pipeline(microbatches=bad), [], "problem.json: at most 500000 tasks .*") for bad in (100_000, 2**31, 2**63)),
        *((pipeline(activation=bad), [], "'actor': activation is .*; use a unit") for bad in (1e308, 5e-324)),
        (pipeline(weight_gradient=1, weight_activation=1e-308), [], "'actor': weight_activation is 1e-308; use a unit"),
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
def test_bad_input_is_refused_before_anything_is_computed(folder, change, arguments, message):
    write(folder, {**PROBLEM, **change})
    assert re.search(message, refused(folder, "--time-limit", 1, *arguments))
    assert [path.name for path in folder.iterdir()] == ["problem.json"]


def test_a_search_needs_an_end_and_an_output_of_its_own(folder):
    assert "--time-limit SECONDS or --iterations N" in refused(folder)
    words = ("--time-limit", 1, "--out", folder / "problem.json", "--force")
    assert "is the problem itself" in refused(folder, *words)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not valid JSON"),
        ("{}", "version is missing; add it"),
        ('{"version": 2, "problem": {}, "tasks": []}', "version is 2; must be 1"),
        ("SEARCH", 'search: seconds is "long"; must be a finite number'),
    ],
)
def test_what_cannot_be_resumed_is_kept(folder, text, message):
    if text == "SEARCH":
        run(folder, "--iterations", 1000)
        text = json.dumps({**read(folder), "search": {"seconds": "long"}})
    (folder / "schedule.json").write_text(text)
    assert message in refused(folder, "--iterations", 1000, "--resume")
    assert (folder / "schedule.json").read_text() == text


# processes: signals, and MPI's ranks


@pytest.fixture
def started(programs, folder):
    """Starts a search without end, by the words before its options; returns it once it has written and heeds signals.

    That is: its first schedule is on disk, and every rank has a handler of its own.
    """

    def start(*launcher):
        write(folder, ENDLESS)
        # a shell's background job is started with Ctrl-C ignored, and its children inherit that: undo it
        heed = "import os, sys, signal as s; s.signal(s.SIGINT, s.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
        words = [sys.executable, "-c", heed, *launcher, *options(folder, "--time-limit", 3600)]
        beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        process = programs.start(*words, PATH=beside)
        eventually(lambda: process.poll() is not None or began(folder, process))
        return process

    return start


def ranks(process):
    """The searches in the tree that `process` leads, in order of start."""
    try:
        tree = psutil.Process(process.pid)
        every = [tree, *tree.children(recursive=True)]
        return sorted(one.pid for one in every if one.cmdline()[1:2] == [str(TOOL)])
    except psutil.Error:  # one of them has just ended
        return []


def began(folder, process):
    """Whether there is a schedule, and every rank has a handler of its own for SIGUSR1, which only the search sets."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in ranks(process)]
    caught = [int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) for status in statuses]
    return (folder / "schedule.json").exists() and caught and all(one >> (signal.SIGUSR1 - 1) & 1 for one in caught)


def stopped(process, signalled, number):
    """What it said, once it and all its ranks are gone."""
    every = ranks(process)
    os.kill(signalled, number)
    told = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    eventually(lambda: not any(map(psutil.pid_exists, every)))
    return told


ALONE = (sys.executable, TOOL)
OF_MPI = (MPIRUN, "--oversubscribe", "-n", 2, *ALONE)
SCRIPT = ("bash", ROOT / "scripts/search_schedule.sh", 2)
mpi = (pytest.mark.mpi, pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun: pip install rlhfuse[mpi]"))


@pytest.mark.parametrize(
    "launcher, whom, number, code, name",
    [
        (ALONE, 0, signal.SIGINT, 130, "Ctrl-C"),
        (ALONE, 0, signal.SIGTERM, 143, "SIGTERM"),
        pytest.param(OF_MPI, None, signal.SIGUSR1, 138, "SIGUSR1", marks=mpi),  # mpirun passes it on
        pytest.param(OF_MPI, -1, signal.SIGUSR1, 138, "SIGUSR1", marks=mpi),  # one rank alone must end the other too
        # what mpirun itself would kill
        pytest.param(SCRIPT, None, signal.SIGINT, 130, "", marks=mpi),
        pytest.param(SCRIPT, None, signal.SIGTERM, 143, "", marks=mpi),
    ],
)
def test_signals_keep_the_best_so_far(folder, started, launcher, whom, number, code, name):
    """Sent to the launcher, or to the rank of that place."""
    process = started(*launcher)
    told = stopped(process, process.pid if whom is None else ranks(process)[whom], number)
    assert process.returncode == code and told.count("go on with --resume") == 1 and "Traceback" not in told, told
    assert not name or told.count(f"stopped by {name} after") == 1
    assert read(folder)["peak_memory"] <= 4 and len(read(folder)["tasks"]) == 4
    assert sorted(path.name for path in folder.iterdir()) == ["problem.json", "schedule.json"]


@mpi[0]
@mpi[1]
def test_two_mpi_ranks_search_together_and_repeat(programs, folder):
    tasks = []
    for _ in range(2):
        asked = options(folder, "--iterations", 200_000, "--seed", 2, "--objective", "memory", "--force")
        launched = programs.mpirun(2, TOOL, *asked)
        assert launched.returncode == 0, launched.stderr
        assert launched.stdout.count("written to") == 1 and launched.stderr.count("(2 ranks)") == 1
        assert read(folder)["search"]["ranks"] == 2 and read(folder)["optimal"]
        tasks.append(read(folder)["tasks"])
    assert tasks[0] == tasks[1]


@mpi[0]
@mpi[1]
def test_bad_input_under_mpirun_is_said_once(programs, folder):
    write(folder, {**PROBLEM, "memory_cap": 1})
    refused = programs.mpirun(2, TOOL, *options(folder, "--time-limit", 5))
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
    assert refused.stderr.count("smallest feasible cap is 2") == 1 and "Traceback" not in refused.stderr
