"""The output file and the live line of a search."""

import json

import pytest
from search_output import ResultFile
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


def test_a_failing_write_is_tried_again_and_only_the_last_one_must_succeed(tmp_path, monkeypatch, capsys):
    folder, schedule = tmp_path / "away", greedy(table_3(2))
    result = ResultFile(folder / "schedule.json")
    for now in (100.0, 101.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        result.improved(schedule, REPORT)
    assert capsys.readouterr().err.count("cannot write") == 1
    with pytest.raises(InputError, match="cannot write"):
        result.write(at_once=True, last=True)
    folder.mkdir()
    result.write(at_once=True, last=True)
    assert json.loads((folder / "schedule.json").read_text())["search"]["seconds"] == 12.0
