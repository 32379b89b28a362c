"""tools/show_schedule.py: text, pictures, trace and refusals."""

import json

import pytest
from schedule_drawing import draw_timelines
from testkit.programs import call_tool

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b


@pytest.fixture
def schedule(tmp_path):
    actor = Pipeline("actor", "actor", (0, 1), 3, (2, 2), (4, 4), (1, 1))
    critic = Pipeline("critic", "critic", (1, 0), 3, (1, 1), (1, 1), (1, 1), (1, 1))
    made = greedy(FusionProblem(2, (actor, critic)))
    save_schedule(tmp_path / "schedule.json", made)
    return made


def show(folder, *arguments):
    return call_tool("show_schedule", folder / "schedule.json", *arguments)


def test_text_parses_back(schedule, tmp_path):
    result = show(tmp_path, "--text")
    assert result.returncode == 0, result.stderr
    grid = "\n".join(line for line in result.stdout.splitlines() if line.startswith("node "))
    assert Schedule.parse(schedule.problem, grid) == schedule
    assert "lower bound" in result.stdout and "serial 1F1B" in result.stdout


def test_pictures_and_trace(schedule, tmp_path):
    pictures = ("--png", tmp_path / "a.png", "--svg", tmp_path / "a.svg")
    result = show(tmp_path, *pictures, "--trace", tmp_path / "trace.json")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names == {str(action) for order in schedule.orders for action in order}
    for node, peak in enumerate(evaluate(schedule).node_peak_memory):
        levels = [event["args"]["activations"] for event in events if event["name"] == f"memory {node}"]
        assert max(levels) == peak and levels[-1] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--nodes", "1-0"], "nodes are 0-1, the smaller number first"),
        (["--nodes", "0-2"], "nodes are 0-1"),
        (["--nodes", "all"], "not of the form A-B"),
        (["--from", "9", "--to", "3"], "nothing lies between times 9 and 3"),
        (["--png", "/missing/a.png"], "cannot write"),
        (["--programs", "actor"], "MODEL=LAYOUT"),
        (["--programs", "actor=d1t1p2"], "critic"),
        (["--programs", "actor=p2"], "form d1t2p4"),
    ],
)
def test_what_cannot_be_shown_exits_2(schedule, tmp_path, arguments, message):
    result = show(tmp_path, *arguments)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "problem": {}, "tasks": []}'])
def test_what_is_no_schedule_exits_2(tmp_path, text):
    (tmp_path / "schedule.json").write_text(text)
    result = show(tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("error: ")


def test_programs_are_lowered_verified_and_printed(schedule, tmp_path):
    shown = show(tmp_path, "--programs", "actor=d1t1p2,critic=d1t1p2")
    assert shown.returncode == 0, shown.stderr
    assert "\nmodel critic layout d1t1p2\nrank 0: " in shown.stdout
    assert "verified: 12 transfers, 6 collectives, one queue per " in shown.stdout
    text = shown.stdout[shown.stdout.index("model actor ") : shown.stdout.index("\nverified")]
    ranks = rank_map(dict.fromkeys(("actor", "critic"), ParallelLayout(1, 1, 2)))
    assert text == lower(schedule, ranks).text()


def test_several_schedules_below_each_other(schedule, tmp_path):
    save_schedule(tmp_path / "serial.json", serial_1f1b(schedule.problem))
    result = show(tmp_path, tmp_path / "serial.json", "--svg", tmp_path / "both.svg")
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if line in ("schedule", "serial") or "makespan" in line]
    assert [said[0], said[2]] == ["schedule", "serial"] and said[1] != said[3]
    picture = (tmp_path / "both.svg").read_bytes()
    assert picture == draw_timelines({"schedule": schedule, "serial": serial_1f1b(schedule.problem)}, "svg")
    refused = show(tmp_path, tmp_path / "serial.json", "--text")
    assert refused.returncode == 2 and "--text is for one schedule, 2 are given" in refused.stderr
    assert show(tmp_path, tmp_path / "schedule.json").returncode == 2
