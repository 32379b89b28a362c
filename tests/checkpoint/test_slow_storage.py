"""Slow storage is no hang: a checkpoint that grows and an export report progress file by file, piece by piece."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from testkit.tiny import write_checkpoint
from testkit.writing import STATE, part_of, writer_of, writing_by

from rlhfuse.checkpoint.checkpoint import Checkpoint, checkpoints_in
from rlhfuse.checkpoint.shard_files import file_name
from rlhfuse.models.hf_folder import write_folder
from rlhfuse.monitor.heartbeat import Limits
from rlhfuse.monitor.watchdog import Watchdog


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def start_one(folder, **more):
    """A writer that is about to write iteration-1."""
    writer = writer_of(0, folder, 1, **more)
    writer.start(1, STATE, part_of(0, 1))
    return writer


def test_a_checkpoint_is_on_disk_before_it_is_the_latest(alone, tmp_path, monkeypatch):
    """Contents before the name, the name and its folder's before `latest`."""
    calls, fsync, replace = [], os.fsync, os.replace

    def note(path):
        calls.append(os.path.relpath(path, tmp_path))

    monkeypatch.setattr(os, "fsync", lambda number: (note(os.readlink(f"/proc/self/fd/{number}")), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda source, to: (note(to), replace(source, to)))
    start_one(tmp_path).finish()
    named, folder = calls.index("checkpoints/iteration-1"), "checkpoints/iteration-1.partial"
    assert f"{folder}/{file_name(0)}" in calls[:named]
    assert calls[named - 2 : named + 3] == [f"{folder}/manifest.json", folder, calls[named], "checkpoints", "."]
    assert calls.index("checkpoints/latest") > named + 2


def test_a_file_that_grows_is_told_of_while_it_is_waited_for(alone, tmp_path):
    """The storage takes the next piece once somebody has seen the one before."""
    heard, missed, told = threading.Event(), [], []

    def slow(write, folder, rank, state):
        for _ in range(3):
            heard.clear()
            with open(folder / file_name(rank), "ab") as file:
                file.write(bytes(1000))
            missed.append(not heard.wait(540))
        return write(folder, rank, state)

    with writing_by(slow):
        start_one(tmp_path, progress=lambda text: (told.append(text), heard.set())).finish()
    assert missed == [False] * 3 and told[0].startswith("saving a checkpoint: ")
    assert [folder.name for folder in checkpoints_in(tmp_path)] == ["iteration-1"]


def test_a_checkpoint_that_is_being_written_survives_sigterm(alone, tmp_path):
    """The rank leaves once its part is whole, though its main thread goes on with the run."""
    begun, asked, release, ended, left = *(threading.Event() for _ in range(4)), []

    def slow(write, *given):
        begun.set()
        assert release.wait(540)
        return write(*given)

    def leave(code):
        left.append((code, [one.name for one in checkpoints_in(tmp_path)]))
        ended.set()

    class Store(dict):
        def set(self, key, value):
            self[key] = value

        def check(self, keys):
            return True

    with writing_by(slow), Watchdog(Store(), 0, 1, Limits(), leave) as watchdog:
        writer = start_one(tmp_path)
        watchdog.is_saving = lambda: (asked.set(), writer.is_saving())[1]
        assert begun.wait(540)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(540) and not left
        release.set()
        assert ended.wait(540)
        watchdog._stopping.set()
    assert left == [(143, ["iteration-1"])]
    writer.finish()


def test_a_checkpoint_learns_what_an_evaluation_after_it_found(alone, tmp_path):
    """Before its manifest is written, and after."""
    release = threading.Event()
    with writing_by(lambda write, *given: write(*given) if release.wait(540) else None):
        writer = start_one(tmp_path)
        for number in (7, 8):
            writer.complete(1, {"metrics_bytes": number})
            release.set()
            writer.finish()
            assert Checkpoint.open(tmp_path / "checkpoints" / "iteration-1").metrics_bytes == number


def test_an_export_tells_of_every_weight_file(tmp_path):
    like, out, told = write_checkpoint(tmp_path / "like"), tmp_path / "out", []
    out.mkdir()
    tensors = [(f"w{number}", torch.zeros(10)) for number in range(5)]
    write_folder(out, tensors, like, 80, scalar_head=False, progress=told.append)
    assert len(told) == 3 and all(text.startswith("exporting models: ") for text in told)
