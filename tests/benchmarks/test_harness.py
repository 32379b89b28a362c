"""The harness: turns, pairs, medians, what a results file says, processes that fail or are missing."""

import json
import os
import sys
import time
from types import SimpleNamespace

import harness
import processes
import psutil
import pytest
from harness import Figure, Measurement, options, take_turns
from processes import Ranks, Worker, environment
from testkit.programs import eventually

from rlhfuse.base.errors import InputError


def measured(tmp_path, *words):
    return Measurement("test", options("", rounds=3).parse_args(["--out", str(tmp_path / "test.json"), *words]))


def test_another_side_is_first_in_each_round():
    order = []
    sides = {name: lambda number, name=name: order.append((number, name)) or f"{name}{number}" for name in "ab"}
    assert take_turns(sides, 2, warm_up=True) == {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    assert order == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_a_ratio_is_the_median_of_pairs():
    ratio = Figure.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (ratio.value, ratio.least, ratio.most, ratio.rounds) == (2.0, 1.0, 3.0, 3)
    assert ratio.text() == "2.00 (1.00-3.00)" and Figure(0.5).text("%") == "50.000000%"
    assert ratio.at_least(2).reached and not ratio.at_most(1.5).reached
    with pytest.raises(ValueError):
        Figure.ratio([1.0, 2.0], [1.0])


def test_a_results_file_says_what_was_measured_where(tmp_path):
    measurement = measured(tmp_path)
    measurement.figure("speed", Figure.of([1.0, 3.0, 2.0], "s").at_most(1.5))
    measurement.table("t", "Title", ("a", "b"), [["x", "1"]])
    measurement.finish()
    found = json.loads((tmp_path / "test.json").read_text())
    speed = {"value": 2.0, "unit": "s", "least": 1.0, "most": 3.0, "rounds": 3, "goal": "<= 1.5", "reached": False}
    assert found["figures"]["speed"] == speed
    assert found["tables"]["t"]["rows"] == [["x", "1"]] and found["machine"]["cores"] == os.cpu_count()
    assert {"command", "commit", "dirty", "date", "load_before", "other_cores"} <= found.keys()


def test_a_results_command_holds_no_path_of_the_machine():
    words = ["/a/b/generation.py", "--policy", "/c/d", "--out", "e/f.json", "--cases", "A"]
    assert harness.command(words) == "generation.py --policy d --out e/f.json --cases A"


def test_a_quick_run_has_no_goals_and_no_place_among_the_results(tmp_path, capsys):
    measurement = measured(tmp_path, "--quick")
    measurement.figure("speed", Figure(1.0).at_least(2))
    assert measurement.finish()["figures"]["speed"] == {"value": 1.0, "unit": ""} and measurement.quick
    assert Measurement("test", options("").parse_args(["--quick"])).out is None


def test_other_programs_are_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "machine_cpu_seconds", iter((100.0, 110.0)).__next__)
    monkeypatch.setattr(harness, "own_cpu_seconds", iter((0.0, 4.0)).__next__)
    clock = SimpleNamespace(monotonic=iter((50.0, 56.0)).__next__, strftime=time.strftime)
    monkeypatch.setattr(harness, "time", clock)
    assert measured(tmp_path).finish()["other_cores"] == pytest.approx(1.0)
    assert "other programs took" in capsys.readouterr().err


def test_what_is_missing_is_refused(tmp_path):
    with pytest.raises(InputError, match="--sizes 1:1,3:1: '3:1' is unknown; give some of 1:1, 2:1"):
        harness.named("--sizes", "1:1,3:1", {"1:1": 1, "2:1": 2})
    with pytest.raises(InputError, match="--trl-python nowhere is not there; run benchmarks/setup_peers.sh trl"):
        harness.peer_python("--trl-python", "nowhere", "trl")
    with pytest.raises(InputError, match="folder .*nowhere is not there"):
        measured(tmp_path / "nowhere")


def test_a_program_that_fails_or_takes_too_long_is_heard(programs):
    with pytest.raises(RuntimeError, match="(?s)ended with code 3.*the reason"):
        processes.run([sys.executable, "-c", "print('the reason'); exit(3)"])
    with pytest.raises(RuntimeError, match="took more than 0.2 s"):
        processes.run(["sleep", "infinity"], timeout=0.2)


def test_a_worker_put_aside_takes_no_cpu_and_goes_on(programs, tmp_path):
    worker = Worker("collections:UserList", tmp_path / "log", environment(1), initlist=["a", "a"])
    try:
        worker.ready()
        worker.put_aside()
        eventually(lambda: psutil.Process(worker._process.pid).status() == psutil.STATUS_STOPPED)
        worker.send(("count", ("a",), {}))
        assert not worker._pipe.poll()
        worker.go_on()
        assert worker.receive() == 2
        with pytest.raises(RuntimeError, match="(?s)failed.*AttributeError"):
            worker.ask("nothing")
    finally:
        worker.close()
    assert worker._process.returncode is not None


def test_ranks_that_fail_at_start_are_heard_and_ended(programs):
    with pytest.raises(RuntimeError, match="(?s)collections:UserLists failed.*AttributeError"):
        Ranks("collections:UserLists", 2)
