"""Weights & Biases, offline: what was logged stands in the run's file."""

import pytest

from rlhfuse.monitor.loggers import WandbLogger
from rlhfuse.monitor.samples import SampleText

wandb = pytest.importorskip("wandb", reason="the wandb package is an optional extra")


def records(file):
    """The records of a .wandb file: 7 bytes of header, then LevelDB log chunks (crc, length, type) in 32 KiB blocks."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def logged(folder):
    """[{name: value}] of every history record of all offline files below `folder` in order, and the ids of runs."""
    rows, ids = [], set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
    return rows, ids


def test_offline_run_holds_every_number_and_resumes_under_its_id(tmp_path):
    first = WandbLogger(tmp_path, "rlhfuse", "offline", {"seed": 1})
    first.log({"iteration": 0, "critic/score/mean": 0.5, "rollout/digest": "text", "actor/lr": float("nan")})
    first.log({"iteration": 1, "critic/score/mean": 0.75}, [SampleText(1, 9, "p", "r", 0.75, 2, "stop")])
    first.close()
    again = WandbLogger(tmp_path, "rlhfuse", "offline", {"seed": 1})
    again.log({"iteration": 2, "critic/score/mean": 1.0})
    again.close()
    rows, ids = logged(tmp_path)
    assert [float(row["critic/score/mean"]) for row in rows] == [0.5, 0.75, 1.0]
    assert [int(row["_step"]) for row in rows] == [1, 2, 3]  # the evaluation before training has step 0
    assert not any("digest" in row or "actor/lr" in row for row in rows)
    assert len(ids) == 1, "one run, whatever the number of starts"
    assert any(name.startswith("samples") for name in rows[1])
