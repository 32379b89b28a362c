"""samples.jsonl survives a kill in the middle of a character, and is on disk where a resumed run counts on it."""

import json
import os
from contextlib import closing
from dataclasses import replace

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.monitor.samples import SampleText, SampleWriter, _line, read_samples

SAMPLES = [SampleText(i, i, "wie spät?", "fünf vor zwölf", 0.5, 4, "stop") for i in range(3)]


@pytest.fixture
def torn(tmp_path):
    """Three samples, and a fourth one cut in the middle of its first character that is no ASCII."""
    file = tmp_path / "samples.jsonl"
    with closing(SampleWriter(file)) as writer:
        writer.write(SAMPLES)
        writer.write([SampleText(3, 3, "ü", "", 0.0, 1, "stop")])
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex("ü".encode()) + 1])
    return file


def test_a_line_torn_inside_a_character_is_left_out(torn):
    assert read_samples(torn) == SAMPLES
    with closing(SampleWriter(torn, keep_bytes=len(torn.read_bytes().splitlines(keepends=True)[0]))) as writer:
        writer.write(SAMPLES[1:])
    assert read_samples(torn) == SAMPLES


def test_a_damaged_line_stops_no_run(torn):
    """What was written before a resumed run began is not its business, nor that somebody made the file shorter."""
    torn.write_bytes(b"{damaged\n" + torn.read_bytes())
    with closing(SampleWriter(torn, keep_bytes=10**6)) as writer:
        writer.write([SAMPLES[0]])
    lines = torn.read_bytes().splitlines()
    assert len(lines) == 5 and lines[0] == b"{damaged" and json.loads(lines[4])["iteration"] == 0


def test_what_is_not_finite_is_none(tmp_path):
    with closing(SampleWriter(tmp_path / "samples.jsonl")) as writer:
        writer.write([replace(SAMPLES[0], score=float(text)) for text in ("nan", "inf", "0.5")])
    assert "NaN" not in (tmp_path / "samples.jsonl").read_text()
    assert [one.score for one in read_samples(tmp_path / "samples.jsonl")] == [None, None, 0.5]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1]", "samples.jsonl:1: must be a JSON object"),
        ('{"iteration": 1}', "samples.jsonl:1: sample_id is missing"),
        (_line(SAMPLES[0]).replace("0.5", '"much"').strip(), 'samples.jsonl:1: score is "much"; must be'),
    ],
)
def test_a_damaged_line_is_named(tmp_path, text, message):
    (tmp_path / "samples.jsonl").write_text(text + "\n")
    with pytest.raises(InputError, match=message):
        read_samples(tmp_path / "samples.jsonl")


def test_what_a_checkpoint_counts_on_is_on_disk(torn, monkeypatch):
    calls, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append("fsync"), fsync(number)))
    with closing(SampleWriter(torn)) as writer:
        writer.write(SAMPLES[2:])
        assert writer.position() == torn.stat().st_size and calls == ["fsync"]
