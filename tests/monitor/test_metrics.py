"""metrics.jsonl keeps every bit, survives a kill and a resume; the progress line and TensorBoard say the same."""

import io
import math
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.small_disk import small_files

from rlhfuse.base.errors import InputError
from rlhfuse.monitor.loggers import ProgressPrinter, progress_parts
from rlhfuse.monitor.metrics import MetricsWriter, read_metrics


@examples(60)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_floats_keep_every_bit(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write({"iteration": 1} | {f"x{i}": value for i, value in enumerate(values)})
    row = read_metrics(path)[0]
    assert [row[f"x{i}"].hex() for i in range(len(values))] == [value.hex() for value in values]


def test_a_line_is_there_at_once_and_nan_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"b": math.nan, "a": torch.tensor(0.5), "iteration": np.int64(1), "c": -math.inf, "d": None, "e": "x"})
    assert path.read_text() == '{"iteration": 1, "a": 0.5, "b": null, "c": null, "d": null, "e": "x"}\n'
    writer.close()


def test_resume_keeps_the_file_up_to_a_position(tmp_path):
    path, kept = tmp_path / "metrics.jsonl", '{"iteration": 1}\n{"iteration": 2, "x": 1e-1}\n'
    path.write_text(kept + '{"iteration": 3}\n{"iterat')
    assert len(read_metrics(path)) == 3
    with closing(MetricsWriter(path, keep_bytes=len(kept))) as writer:
        writer.write({"iteration": 3, "x": 1})
        assert writer.position() == path.stat().st_size
    assert path.read_text() == kept + '{"iteration": 3, "x": 1}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    for wrong in (len(kept) - 1, 1000):
        with pytest.raises(InputError, match=f"byte {wrong} is not the end of a line"):
            MetricsWriter(path, keep_bytes=wrong)
    path.write_text(kept + '{"iterat')
    MetricsWriter(path).close()
    assert path.read_text() == kept


@pytest.mark.parametrize(
    "text, message",
    [
        ("{}\n", "no integer 'iteration'"),
        ('{"iteration": true}\n', "no integer 'iteration'"),
        ('{"iteration": 0}\n{\n', "jsonl:2: not valid JSON .*; remove the line"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_metrics(path)


METRICS = {
    "iteration": 3,
    "critic/score/mean": 0.412,
    "actor/ref_kl": 0.0131,
    "response_length/mean": 87.2,
    "response_length/clip_ratio": 0.031,
    "perf/throughput": 4210.4,
    "timing_s/step": 2.0,
    "timing_s/train": 0.6,
    "timing_s/gen": 1.2,
    "timing_s/graph_capture": 0.3,  # a part of it
    "timing_s/adv": 0.001,
}


def test_progress_line():
    stream = io.StringIO()
    ProgressPrinter(10, stream).log(METRICS)
    assert stream.getvalue() == (
        "iteration  3/10  score +0.412  kl 0.0131  length 87.2  (3% cut)  4,210 tokens/s  2.00 s: gen 60%, train 30%\n"
    )
    assert progress_parts({"iteration": 1, "critic/score/mean": None}, 9) == [("iteration 1/9", "bold")]


def test_tensorboard_reads_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlhfuse.monitor.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path)
    logger.log({**METRICS, "text": "x", "nothing": None, "bad": math.nan})
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS) - {"iteration"}
    event = events.Scalars("critic/score/mean")[0]
    assert event.step == 3 and event.value == pytest.approx(0.412)


def test_a_line_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for number in (0, 1):
            writer.write({"iteration": number})
        with small_files(1000), pytest.raises(InputError, match="File too large"):
            writer.write_again({"iteration": 1, "x": "y" * 2000})
        assert read_metrics(path) == [{"iteration": 0}, {"iteration": 1}]
        writer.write_again({"iteration": 1, "x": 2})
        writer.write({"iteration": 2})
    assert read_metrics(path) == [{"iteration": 0}, {"iteration": 1, "x": 2}, {"iteration": 2}]
