"""Files of users: one module each, helpers beside them, and whatever they start ends with the program."""

import multiprocessing
import pickle
import random
import shutil
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from testkit.programs import eventually

from rlhfuse.data.reward_function import load_module

SOURCE = """
import beside
with open({log!r}, "a") as file: file.write("executed\\n")
class Kept: value = beside.VALUE
def kept(): return Kept()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files and their helper in one below, links, and a random of its own in both."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    loaded = {*sys.modules}
    (tmp_path / "own").mkdir()
    for place in (tmp_path, tmp_path / "own"):
        (place / "random.py").write_text("raise ValueError('the one of the standard library is meant')\n")
    (tmp_path / "own" / "beside.py").write_text("import random\nVALUE = random.Random.__module__\n")
    (tmp_path / "linked").symlink_to("own")
    (tmp_path / "link.py").symlink_to("own/shelf.py")
    for name in ("shelf.py", "my-shelf.py", "random.py"):
        (tmp_path / "own" / name).write_text(SOURCE.format(log=str(tmp_path / "log")))
    yield tmp_path
    for name in {*sys.modules} - loaded:
        del sys.modules[name]


WRITTEN = ("own/{}", "./own/{}", "own/../own/{}", "{folder}/own/{}", "linked/{}", "{folder}/linked/{}")


@pytest.mark.parametrize("name", ["shelf.py", "my-shelf.py", "random.py"])
def test_a_file_is_one_module_however_its_path_is_written(folder, name):
    """Also where its name is no identifier, or another module's, which stays what it is; classes can be pickled."""
    written = [path.format(name, folder=folder) for path in WRITTEN] + ["link.py"] * (name == "shelf.py")
    modules = [load_module(path, "key", path) for path in written]
    assert len(set(map(id, modules))) == 1 and (folder / "log").read_text() == "executed\n"
    kept = pickle.loads(pickle.dumps(modules[0].Kept()))
    assert type(kept) is modules[0].Kept and kept.value == "random"
    if name == "shelf.py":  # processes that it starts find its functions and classes
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert type(pool.submit(modules[0].kept).result()) is load_module("shelf", "key", "shelf:f").Kept
    assert sys.modules["random"] is random and load_module("random", "key", "random") is random
    shutil.copytree(folder / "own", folder / "other")
    other = load_module(f"other/{name}", "key", name)
    assert other is not modules[0] and type(pickle.loads(pickle.dumps(other.Kept()))) is other.Kept


def test_timers_and_signals_are_left_as_they_were(folder):
    asked = "import signal\nsignal.setitimer(signal.ITIMER_REAL, 1e4)\nsignal.setitimer(signal.ITIMER_PROF, 1e4, 1)\n"
    asked += "signal.signal(signal.SIGALRM, print)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (folder / "timer.py").write_text(asked)
    own, terminated = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM)
    load_module("timer.py", "key", "timer.py:f")
    assert signal.signal(signal.SIGALRM, own) is print, "calls of the file may set alarms"
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 1e3 and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGTERM) == terminated


HELD = """
import asyncio, atexit, multiprocessing, os, signal, subprocess, threading, time
from concurrent.futures import ThreadPoolExecutor
threading.Thread(target=asyncio.new_event_loop().run_forever).start()
ThreadPoolExecutor(1).submit(time.sleep, 1e6)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(1)
atexit.register(time.sleep, 1e6)
def begin(where):
    child = subprocess.Popen(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE)
    pids = [int(child.communicate()[0]), subprocess.Popen(["sleep", "1000"], start_new_session=True).pid]
    with open(where, "a") as file: file.write("".join(f"{pid}\\n" for pid in pids))
begin(os.environ["PIDS"])
if multiprocessing.parent_process() is None:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,)).start()
def reward(completions, **columns): return [float(bool(begin(os.environ["PIDS"]))) for _ in completions]
"""
PROGRAM = """
import atexit, sys
from contextlib import closing
from rlhfuse.base import errors
from rlhfuse.data.reward_function import RewardCall
from rlhfuse.data.reward_workers import RewardWorkers
from rlhfuse.tools.program import run_program
def main():
    with closing(RewardWorkers((["held.py:reward"], "trl"), 1, 1e4)) as workers:
        workers.submit([RewardCall((1,), {}, "p", ("text",), ((),))]); workers.finish()
    atexit.register(print, "flushed")
    print("finished")
    failed = {"1": errors.RewardError, "2": errors.InputError, "3": KeyError}.get(sys.argv[1])
    if failed: raise failed("why it failed")
if __name__ == "__main__":
    errors.EXIT_SECONDS = 0.5
    run_program(main, tear_down=False)
"""


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_what_a_file_starts_keeps_no_program_and_ends_with_it(programs, tmp_path, code):
    """Threads, an executor, an event loop, an alarm, an exit function and processes in sessions of their own."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = programs.python("program.py", str(code), cwd=tmp_path, PIDS=str(tmp_path / "pids"))
    assert done.returncode == (code if code < 3 else 1), done.stderr
    assert done.stdout.split() == ["finished", "flushed"]
    said = [line for line in done.stderr.splitlines() if "why it failed" in line]
    assert bool(said) == bool(code) and (not code or said[-1].startswith("error: "))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 6, "two of the program, two of its worker, two of the call"
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), "processes outlived the program")
