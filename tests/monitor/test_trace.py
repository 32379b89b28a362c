"""Traces: what Perfetto reads, and what reads back."""

import json

import pytest
from run_report.run_files import load_trace

from rlhfuse.base.clock import Span
from rlhfuse.base.errors import InputError
from rlhfuse.monitor.trace import save_trace

SPANS = [
    Span("generate", "generate", 0, 0.0, 1.5, "measured", {"samples": 3}),
    Span("actor:0F0", "actor F", 1, 1.5, 1.75, "measured"),
    Span("generate", "generate", 0, 0.0, 1.25, "predicted"),
]


def test_chrome_trace_has_a_process_per_group_and_a_thread_per_rank(tmp_path):
    save_trace(SPANS, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", 0, 0, "predicted"),
        ("process_name", 1, 0, "measured"),
        ("thread_name", 0, 0, "rank 0"),
        ("thread_name", 1, 0, "rank 0"),
        ("thread_name", 1, 1, "rank 1"),
    }
    forward = next(e for e in events if e["name"] == "actor:0F0")
    assert (forward["ts"], forward["dur"], forward["cat"]) == (1.5e6, 0.25e6, "actor F")


def test_trace_reads_back(tmp_path):
    save_trace(SPANS, tmp_path / "trace.json")
    assert sorted(load_trace(tmp_path / "trace.json"), key=str) == sorted(SPANS, key=str)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_bad_spans_and_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="group 'guessed'"):
        Span("x", "x", 0, 0, 1, "guessed")
    with pytest.raises(InputError, match="before"):
        Span("x", "x", 0, 2, 1)
    with pytest.raises(InputError, match="does not exist"):
        load_trace(tmp_path / "none.json")


EVENT = {"ph": "X", "name": "a", "cat": "b", "pid": 1, "tid": 0, "ts": 0.0, "dur": 1.0, "args": {}}


@pytest.mark.parametrize(
    "events, message",
    [
        ([], "bad.json is not a trace written by this program"),
        ({"traceEvents": [3]}, "is not a trace"),
        ({"traceEvents": 3}, "is not a trace"),
        ({"traceEvents": [EVENT | {"ts": "0"}]}, "is not a trace"),
        ({"traceEvents": [EVENT | {"pid": 7}]}, "is not a trace"),
        ({"traceEvents": [EVENT | {"name": []}]}, "bad.json: .*name is"),
        ({"traceEvents": [EVENT | {"dur": -3}]}, "bad.json: .*before"),
        ({"traceEvents": [EVENT | {"ts": float("nan")}]}, "bad.json: not valid JSON .NaN"),
        ("[" * 100_000, "bad.json: JSON nested more than"),
    ],
)
def test_a_broken_trace_is_one_line(tmp_path, events, message):
    (tmp_path / "bad.json").write_text(events if isinstance(events, str) else json.dumps(events))
    with pytest.raises(InputError, match=message) as caught:
        load_trace(tmp_path / "bad.json")
    assert "\n" not in str(caught.value)
