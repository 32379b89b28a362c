"""The launcher for one machine: exit codes, the last word, and signals, with programs that take no time to start."""

import json
import logging
import os
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest
from rank_starter import start_ranks
from testkit.programs import eventually

RANK = """
import json, os, signal, sys, time
from pathlib import Path

rank, (what, folder) = int(os.environ["RANK"]), sys.argv[1:]
assert os.environ["WORLD_SIZE"] == "2" and os.environ["OMP_NUM_THREADS"] == "1"
assert os.environ["MASTER_ADDR"] == "127.0.0.1" and "PYTHONSAFEPATH" not in os.environ
Path(folder, str(rank)).touch()
while not Path(folder, "0").exists():
    time.sleep(0.02)
if what == "waits":
    def end(number, frame):
        Path(folder, f"{rank} got {signal.Signals(number).name}").touch()
        sys.exit(128 + number)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, end)
    Path(folder, f"{rank} is ready").touch()
    time.sleep(500)
if rank == 1 and what == "told":
    from rlhfuse.base.errors import InputError
    from rlhfuse.tools.program import run_program
    def full():
        raise InputError("the disk is full; free space")
    run_program(full, prints=lambda what, seconds: True)
if rank == 1 and what == "untold":
    sys.exit(7)
if rank == 1 and what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what != "done":
    time.sleep(500)
"""


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """torchrun's launcher takes over a process: its signals, environment and logs are given back."""
    names = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1
    handlers = {one: signal.getsignal(one) for one in names}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop("OMP_NUM_THREADS", None)
    yield
    logging.disable(logging.NOTSET)
    for one, handler in handlers.items():
        signal.signal(one, handler)


@pytest.fixture
def start(programs, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    return lambda what: start_ranks(2, [str(tmp_path / "rank.py"), what, str(tmp_path)], 60)


@pytest.mark.parametrize(
    "what, code, last",
    [
        ("done", 0, ""),
        ("told", 2, "error: rank 1: the disk is full; free space\n"),
        ("untold", 7, "error: rank 1 left with 7\n"),
        ("killed", 137, "error: rank 1 was ended by SIGKILL\n"),
    ],
)
def test_the_exit_code_is_passed_on_and_the_error_is_the_last_line(
    start, tmp_path, capfd, monkeypatch, what, code, last
):
    told = tmp_path / "told.json"
    monkeypatch.setitem(os.environ, "TORCHELASTIC_ERROR_FILE", str(told))
    assert start(what) == code
    assert capfd.readouterr().err == last and (tmp_path / "0").exists() and (tmp_path / "1").exists()
    assert told.exists() == (what == "told")
    if what == "told":
        assert json.loads(told.read_text())["message"]["message"] + "\n" == last


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_reaches_every_rank_once(start, tmp_path, capfd, number, code):
    def interrupt():
        eventually(lambda: all((tmp_path / f"{rank} is ready").exists() for rank in (0, 1)))
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    assert start("waits") == code
    assert all((tmp_path / f"{rank} got {number.name}").exists() for rank in (0, 1))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("ignored, first, then", [("SIGHUP", "SIGHUP", "SIGTERM"), ("SIGINT", "SIGINT", "SIGUSR1")])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(start, tmp_path, ignored, first, then):
    signal.signal(signal.Signals[ignored], signal.SIG_IGN)

    def interrupt():
        eventually(lambda: all((tmp_path / f"{rank} is ready").exists() for rank in (0, 1)))
        os.kill(os.getpid(), signal.Signals[first])
        assert signal.getsignal(signal.Signals[ignored]) is signal.SIG_IGN
        os.kill(os.getpid(), signal.Signals[then])

    threading.Thread(target=interrupt, daemon=True).start()
    assert start("waits") == 128 + signal.Signals[then]
    assert not list(tmp_path.glob(f"* got {first}")) and len(list(tmp_path.glob(f"* got {then}"))) == 2


@pytest.mark.parametrize("on_gpus, trial, bound", [(True, 0, "node"), (True, 1, None), (False, 0, None)])
def test_ranks_are_bound_to_the_cores_beside_their_gpus_where_they_can_be(monkeypatch, capsys, on_gpus, trial, bound):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: SimpleNamespace(returncode=trial))
    monkeypatch.setattr("torch.distributed.run.run", asked.append)
    assert start_ranks(8, ["program.py", "a=b"], 60, on_gpus) == 0
    assert (asked[0].numa_binding, asked[0].nproc_per_node, asked[0].training_script_args) == (bound, "8", ["a=b"])
    assert ("not bound" in capsys.readouterr().err) == (on_gpus and bound is None)
