"""The journal of tool calls: found again by place and contents, also after a kill in the middle of a line."""

import json
import math
from dataclasses import asdict, replace

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import read_json_lines
from rlhfuse.data.tool_journal import JournalEntry, ToolJournal, check_replay
from rlhfuse.data.tool_set import ToolCall


def call(number=0, **arguments):
    return ToolCall(7, number, "add", arguments, 1, {})


def entry(iteration, one, answer="5", error="", state=None):
    return JournalEntry.of(iteration, one, answer, error, 0.25, state)


def test_what_was_written_is_found_by_place_and_contents(tmp_path):
    first = ToolJournal(tmp_path, 2, first=None)
    assert first.find("3", call(a=1)) is None
    first.append(entry("3", call(a=1), "ü", state=b"\x00\xff"))
    first.append(entry("3", call(1, a=math.nan), "Error: x", "Error: x"))
    first.append(entry("3/val", call(a=1), "6"))
    first.close()
    with open(tmp_path / "tool_calls.2.jsonl", "a") as file:
        file.write('{"iteration": "3", "sample')
    other = ToolJournal(tmp_path, 0, first=0)
    found = other.find("3", call(a=1))
    assert found.answer == "ü" and found.state_bytes == b"\x00\xff" and found.seconds == 0.25
    assert other.find("3", call(1, a=math.nan)).error == "Error: x" and other.find("3/val", call(a=1)).answer == "6"
    for missing in (
        call(a=2),
        call(1, a=1),
        ToolCall(8, 0, "add", {"a": 1}, 1, {}),
        ToolCall(7, 0, "sub", {"a": 1}, 1, {}),
    ):
        assert other.find("3", missing) is None
    assert other.find("4", call(a=1)) is None
    again = ToolJournal(tmp_path, 2, first=0)
    again.append(entry("4", call(a=1)))
    kept = read_json_lines(JournalEntry, tmp_path / "tool_calls.2.jsonl")
    assert [one.iteration for one in kept] == ["3", "3", "3/val", "4"]
    later = ToolJournal(tmp_path, 5, first=5)
    assert later.find("3", call(a=1)) is None and later.find("4", call(a=1)).answer == "5"
    for journal in (other, again, later):
        journal.close()


def test_a_run_that_begins_knows_nothing_and_one_that_replays_the_other_s(tmp_path):
    (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
    old = ToolJournal(tmp_path / "old", 0, first=None)
    old.append(entry("0", call(a=1)))
    old.close()
    fresh = ToolJournal(tmp_path / "old", 0, first=None)
    assert fresh.find("0", call(a=1)) is None and not (tmp_path / "old" / "tool_calls.0.jsonl").read_bytes()
    fresh.append(entry("0", call(a=1), "9"))
    fresh.close()
    check_replay(str(tmp_path / "old"))
    check_replay("")
    new = ToolJournal(tmp_path / "new", 0, first=None, replay=str(tmp_path / "old"))
    assert new.find("0", call(a=1)).answer == "9"
    new.close()
    for wrong in (str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(
            InputError, match=r"rollout.multi_turn.replay=.* has no tool_calls.\*.jsonl; give the folder"
        ):
            check_replay(wrong)


WHOLE = asdict(entry("3", call(a=1), state=b"x"))
BAD = [
    {"iteration": 3},
    *(WHOLE | {"iteration": wrong} for wrong in ("", "x", "3x", "1" * 5000, "3.0", "/val")),
    *(WHOLE | {"state": wrong} for wrong in ("x", "ü", "====", "a b=", 3)),
]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("replays", [False, True])
def test_a_broken_line_is_named(tmp_path, line, replays):
    (tmp_path / "tool_calls.0.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=r"tool_calls.0.jsonl:1: ") as caught:
        ToolJournal(tmp_path, 1, None if replays else 0, str(tmp_path) if replays else "")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_call_is_known_by_all_that_its_answer_depends_on():
    one = ToolCall(7, 0, "add", {"a": 1}, 1, {"x": [1]}, b"state", "file")
    others = [replace(one, **change) for change in ({"tool": "sub"}, {"arguments": {"a": 2}}, {"seed": 2})]
    others += [replace(one, **change) for change in ({"row": {"x": [2]}}, {"state": b""}, {"state": None})]
    others.append(replace(one, source="another file"))
    digests = {call.digest for call in (one, *others)}
    assert len(digests) == 1 + len(others) and replace(one).digest == one.digest
