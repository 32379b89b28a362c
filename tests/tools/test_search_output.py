"""The output file and the live line of a search."""

import io
import json
from dataclasses import replace

import pytest
from search_output import LONGEST_WAIT_SECONDS, EarlierRuns, LiveLine, ResultFile
from testkit.schedule_cases import table_3

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.schedule.search.search import SearchReport, SearchSettings

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
    settings=SearchSettings(iterations=1, objective="memory"),
    ranks=2,
    signal=0,
)


@pytest.fixture
def schedule():
    return greedy(table_3(2))


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
    first = EarlierRuns().facts(REPORT)
    second = EarlierRuns.read({"search": first}, "file").facts(replace(REPORT, first_bound_seconds=2.5))
    assert (second["seconds"], second["moves"], second["accepted"], second["runs"]) == (24.0, 6_000_000, 2000, 2)
    assert first["first_bound_seconds"] is None and second["first_bound_seconds"] == 14.5
    third = EarlierRuns.read({"search": second}, "file").facts(replace(REPORT, first_bound_seconds=0.1))
    assert third["first_bound_seconds"] == 14.5 and third["runs"] == 3
    assert EarlierRuns.read({}, "file") == EarlierRuns()


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
    stream = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    live = LiveLine(stream)
    for _ in range(10):
        clock[0] += 0.25
        live.show(replace(REPORT, moves=0))
    live.end()
    shown = stream.getvalue()
    assert shown.count("\n") == 2 and shown.endswith("\n") and shown.count("\r") == 5
    assert all(len(part) <= 50 for part in shown.strip("\n").replace("\n", "").split("\r\033[K"))
