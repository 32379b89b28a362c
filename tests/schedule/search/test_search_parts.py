"""What surrounds a search: its file, its line, its signals, and what its ranks tell each other."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from schedule_cases import TABLE_3, table_3_problem

from rlhfuse.errors import InputError
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.schedule.search.live_line import LiveLine
from rlhfuse.schedule.search.result_file import LONGEST_WAIT_SECONDS, ResultFile, Spent
from rlhfuse.schedule.search.search import SearchReport
from rlhfuse.schedule.search.signals import Signals

ROOT = Path(__file__).resolve().parents[3]
MPIRUN = Path(sys.executable).parent / "mpirun"
REPORT = SearchReport(
    makespan=240,
    lower_bound=225,
    peak_memory=17.55,
    memory_lower_bound=15.6,
    moves=3_000_000,
    accepted=1000,
    seconds=12.0,
    first_seconds=0.5,
    kernel_seconds=1.5,
    moving_seconds=10.0,
    first_bound_seconds=None,
    seed=1,
    ranks=2,
    objective="memory",
    method="default",
    signal=0,
)


@pytest.fixture
def schedule():
    return greedy(table_3_problem(*TABLE_3[2][0]))


def seconds_in(path):
    return json.loads(path.read_text())["search"]["seconds"]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_finds_that_follow_each_other_share_a_write_and_none_waits_long(schedule, tmp_path, clock):
    path = tmp_path / "schedule.json"
    result = ResultFile(path)
    result.improved(schedule, REPORT)
    assert seconds_in(path) == 12.0  # the first is written at once
    result.next_write = clock[0] + LONGEST_WAIT_SECONDS  # as after a slow write
    result.improved(schedule, replace(REPORT, seconds=12.2))
    result.improved(schedule, replace(REPORT, seconds=12.4))
    assert seconds_in(path) == 12.0
    clock[0] += LONGEST_WAIT_SECONDS
    result.write()
    assert seconds_in(path) == 12.4
    result.next_write = clock[0] + LONGEST_WAIT_SECONDS
    result.improved(schedule, replace(REPORT, seconds=12.6))
    result.write(at_once=True)  # as when a signal has come
    assert seconds_in(path) == 12.6


def test_a_failing_write_is_tried_again_and_only_the_last_one_must_succeed(schedule, tmp_path, clock, capsys):
    folder = tmp_path / "away"
    result = ResultFile(folder / "schedule.json")
    for _ in range(2):
        result.improved(schedule, REPORT)
        clock[0] += 1
    assert capsys.readouterr().err.count("cannot write") == 1
    with pytest.raises(InputError, match="cannot write"):
        result.write(at_once=True, last=True)
    folder.mkdir()
    result.write(at_once=True, last=True)
    assert seconds_in(folder / "schedule.json") == 12.0


def test_what_runs_have_spent_adds_up():
    first = Spent().facts(REPORT)
    second = Spent.read({"search": first}, "file").facts(replace(REPORT, first_bound_seconds=2.5))
    assert (second["seconds"], second["moves"], second["accepted"], second["runs"]) == (24.0, 6_000_000, 2000, 2)
    assert first["first_bound_seconds"] is None and second["first_bound_seconds"] == 14.5
    third = Spent.read({"search": second}, "file").facts(replace(REPORT, first_bound_seconds=0.1))
    assert third["first_bound_seconds"] == 14.5 and third["runs"] == 3
    assert Spent.read({}, "file") == Spent()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_a_line_when_it_improves_and_now_and_then(clock):
    stream = io.StringIO()
    live = LiveLine(stream, time_limit=60)
    live.show(replace(REPORT, moves=0, moving_seconds=0))
    assert stream.getvalue().startswith("first schedule in 0.50 s\nmakespan 240, bound 225")
    assert stream.getvalue().count("\n") == 2 and "moves/s" not in stream.getvalue()
    for step in range(1, 41):  # ten seconds, better every quarter of one
        clock[0] += 0.25
        live.show(replace(REPORT, makespan=240 - step))
    lines = stream.getvalue().splitlines()
    assert lines[2] == "kernels ready in 1.50 s" and len(lines) == 6
    assert lines[3] == (
        "makespan 228, bound 225, gap 1.33%, memory 17.55, bound 15.6, gap 12.50%, 12.0/60 s, 150,000 moves/s per rank"
    )
    for _ in range(90):  # nothing new
        clock[0] += 1
        live.show(replace(REPORT, makespan=200))
    assert len(stream.getvalue().splitlines()) == 8


def test_a_terminal_has_one_line_rewritten_in_place(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    stream = Terminal()
    live = LiveLine(stream)
    for _ in range(10):
        clock[0] += 0.25
        live.show(replace(REPORT, moves=0))
    live.end()
    shown = stream.getvalue()
    assert shown.count("\n") == 2 and shown.endswith("\n") and shown.count("\r") == 5
    assert all(len(part) <= 50 for part in shown.strip("\n").replace("\n", "").split("\r\033[K"))


def test_signals_are_remembered_and_a_second_ctrl_c_insists():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # the batch system and mpirun both
            assert signals.received == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGINT, before)


EXCHANGE = """
import os
import time
import numpy as np
from mpi4py import MPI
from rlhfuse.schedule.search.exchange import Exchange, Say

exchange = Exchange(5, MPI.COMM_WORLD, MPI.MIN)
looks = 0
rank = exchange.rank
best = [(9.0, 9.0)]

def round_of(keys, **more):
    own = keys[rank]
    say = Say(own, np.arange(5) + 10 * rank, **more) if own else Say(**more)
    heard = exchange.agree(say, lambda key: key < best[0])
    first = None if heard.sequence is None else int(heard.sequence[0]) // 10
    assert first is None or list(heard.sequence) == [10 * first + i for i in range(5)]
    return first, heard

nothing = None
assert round_of([nothing, nothing, nothing])[0] is None
assert round_of([(9.0, 9.0), nothing, (10.0, 1.0)])[0] is None       # no better than what all have
assert round_of([nothing, (8.0, 9.0), (8.5, 1.0)])[0] == 1           # the makespan decides
assert round_of([(8.0, 9.0), (8.0, 7.0), (8.0, 8.0)])[0] == 1        # then the peak memory
assert round_of([nothing, (8.0, 7.0), (8.0, 7.0)])[0] == 1           # then the lowest rank
assert round_of([(9.0, 9.5), (9.0, 8.0), nothing])[0] == 1           # only the memory is better
heard = round_of([nothing] * 3, share=0.5 + rank, signal=15 * (rank == 2), tried=10**12 + rank, accepted=rank)[1]
assert heard == (None, 0.5, 15, 3 * 10**12 + 3, 3)
def free():                                                          # as long as rank 1 keeps them waiting
    global looks
    looks += 1
    if looks == 5:
        open(f"free{rank}", "w").close()
exchange.idle = free
while rank == 1 and not (os.path.exists("free0") and os.path.exists("free2")):
    time.sleep(0.01)
round_of([nothing] * 3)
print("rank", rank, "agrees", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")
def test_three_ranks_agree(tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    result = subprocess.run(
        [str(MPIRUN), "--oversubscribe", "-n", "3", sys.executable, str(tmp_path / "exchange.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **root},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} agrees" for rank in range(3)]
