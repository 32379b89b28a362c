"""What a launcher leaves: cores that mpirun binds, and Pythons that are started in a folder with foreign files."""

import os
import sys

import pytest
from testkit.paths import ROOT

from rlhfuse.base.launcher import MPI_RANK, cores_of_machine, module_command

PLANTED = ("html", "random", "runpy", "socket", "pickle", "json", "encodings", "argparse")


@pytest.mark.parametrize("name", MPI_RANK)
def test_the_cores_of_a_machine_are_not_those_that_mpirun_binds_to(monkeypatch, name):
    every = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(every)})
        assert cores_of_machine() == {min(every)}, "somebody else's binding, such as taskset's"
        monkeypatch.setenv(name, "2")
        assert cores_of_machine() >= every and os.sched_getaffinity(0) == {min(every)}
    finally:
        os.sched_setaffinity(0, every)


@pytest.fixture
def planted(tmp_path):
    """A folder with files that nothing but what is beside them is to import."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"print('{name} was imported'); raise SystemExit(7)")
    (tmp_path / "there").mkdir()
    return tmp_path


def test_a_module_is_run_without_the_files_of_the_current_folder(programs, planted):
    (planted / "there" / "mine.py").write_text("import html, random, sys; print(__name__, *sys.argv[1:])")
    command = module_command("mine", "a", "b c")
    done = programs.run(*command, cwd=planted, PYTHONPATH=f"{ROOT}:{planted}/there")
    assert (done.returncode, done.stdout) == (0, "__main__ a b c\n"), done.stderr


REWARD = """
import multiprocessing, os

def score(completions):
    return [0.0]

if multiprocessing.parent_process():
    os.mkdir(f"children have {os.environ.get('PYTHONSAFEPATH')}")
"""
WORKER = """
import glob, time
from rlhfuse.data.reward_workers import RewardWorkers

workers = RewardWorkers((["there/mine.py:score"], "trl"), 1, 60.0)
while not (seen := glob.glob("children have*")):
    time.sleep(0.02)
workers.close()
print(seen)
"""


@pytest.mark.skipif(not hasattr(sys.flags, "safe_path"), reason="3.10 has no means")
def test_workers_import_nothing_from_the_current_folder(programs, planted):
    (planted / "there" / "mine.py").write_text(REWARD)
    done = programs.python("-c", WORKER, cwd=planted, PYTHONSAFEPATH="1", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, "['children have None']\n"), done.stderr
