"""Whatever keeps a checkpoint from being written ends the job on all ranks, naming rank, file and cause."""

from __future__ import annotations

import io
import os
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from testkit.programs import eventually

from rlhfuse.base.errors import JointError
from rlhfuse.checkpoint import writer as checkpoint_writer
from rlhfuse.checkpoint.checkpoint import Checkpoint, RunState, checkpoints_in
from rlhfuse.checkpoint.compatibility import RunCompatibility
from rlhfuse.checkpoint.writer import CheckpointWriter
from rlhfuse.parallel.fragments import Fragment, Place

NO_FACTS = RunCompatibility(4, {}, {}, "", {})
STATE = RunState({}, {}, {"metrics_bytes": 7})


def quarter(rank: int) -> dict:
    """What a rank owns: 100 of the 400 elements of one parameter."""
    place = Place((400,), 0, ((0, 400),), 100 * rank, 100 * (rank + 1))
    return {"actor": [Fragment("w", place, 1, {"main": torch.arange(100.0)})]}


def message_of(writer: CheckpointWriter, rank: int) -> str:
    """What is raised when checkpoint 2 cannot be written, after 1 was."""
    try:
        writer.start(2, STATE, quarter(rank))
        time.sleep(0.6)  # longer than rank 0 waits for files, were it to count from here
        writer.finish()
        return "nothing was raised"
    except JointError as error:
        return str(error)


def fail_to_write(rank: int, out: Path, failing: int, seconds: float) -> str:
    """The allocator of rank `failing` refuses while it writes its file."""
    writer, write = CheckpointWriter(out, rank, 4, NO_FACTS, 2, seconds), checkpoint_writer.write_rank_file
    writer.start(1, STATE, quarter(rank))
    writer.finish()

    def refused(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    checkpoint_writer.write_rank_file = refused if rank == failing else write
    try:
        return message_of(writer, rank)
    finally:
        checkpoint_writer.write_rank_file = write


@pytest.mark.parametrize("failing, seconds", [(0, 60.0), (2, 60.0), (2, 0.3)])
def test_an_error_of_any_kind_in_the_thread_ends_all_ranks_by_its_own_name(workers, tmp_path, failing, seconds):
    folder = tmp_path / "checkpoints"
    messages = workers.run(fail_to_write, tmp_path, failing, seconds)
    file = folder / "iteration-2.partial" / f"rank-{failing}.safetensors"
    cause = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    words = f"rank {failing}: cannot write {file}: {cause}; the last good checkpoint is {folder / 'iteration-1'}"
    assert messages == [f"{words}: start again with trainer.resume=auto"] * 4
    assert sorted(one.name for one in folder.iterdir()) == ["iteration-1", "latest"]


def fail_to_gather(rank: int, out: Path) -> str:
    """Rank 0's storage fails while it looks for the file of rank 2."""
    is_file = Path.is_file

    def stale(self: Path) -> bool:
        if rank == 0 and self.name == "rank-2.json":
            raise OSError(116, os.strerror(116), str(self))
        return is_file(self)

    writer = CheckpointWriter(out, rank, 4, NO_FACTS, 2, 60)
    Path.is_file = stale
    try:
        return message_of(writer, rank)
    finally:
        Path.is_file = is_file


def test_an_error_of_the_storage_while_files_are_gathered_ends_all_ranks(workers, tmp_path):
    messages = workers.run(fail_to_gather, tmp_path)
    note = tmp_path / "checkpoints" / "iteration-2.partial" / "rank-2.json"
    words = f"rank 0: cannot read {note}: Stale file handle; no checkpoint was saved"
    assert all(message.startswith(words) for message in messages), messages


def last_good_while_rank_0_commits(rank: int, out: Path) -> str:
    """Rank 0 commits when all others have asked for the last good checkpoint."""
    writer, asked = CheckpointWriter(out, rank, 4, NO_FACTS, 2, 60), out / "asked"
    commit = writer._commit

    def late(*arguments):
        eventually(lambda: len(list(asked.glob("*"))) == 3)
        return commit(*arguments)

    writer._commit = late
    writer.start(1, STATE, quarter(rank))
    if rank:
        asked.mkdir(exist_ok=True)
        (asked / str(rank)).touch()
    return writer.last_good()


def test_every_rank_names_the_checkpoint_that_is_being_committed(workers, tmp_path):
    said = workers.run(last_good_while_rank_0_commits, tmp_path)
    where = f"the last good checkpoint is {tmp_path / 'checkpoints' / 'iteration-1'}"
    assert said == [f"{where}: start again with trainer.resume=auto"] * 4


def prune_in_vain(rank: int, out: Path) -> str:
    """Three checkpoints, of which two stay; the first cannot be removed when its turn comes, but then it can."""
    writer, rmtree = CheckpointWriter(out, rank, 4, NO_FACTS, 2, 60), shutil.rmtree
    said = io.StringIO()

    def busy(folder, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, os.strerror(39), str(folder))

    for iteration in (1, 2, 3, 4):
        shutil.rmtree = busy if iteration == 3 else rmtree
        try:
            with redirect_stdout(said):
                writer.start(iteration, STATE, quarter(rank))
                writer.finish()
        finally:
            shutil.rmtree = rmtree
        if iteration == 3 and rank == 0:
            left = sorted(one.name for one in (out / "checkpoints").iterdir() if "iteration-4" not in one.name)
            print(*left, file=said)  # the other ranks may have begun the next one
    return said.getvalue()


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(workers, tmp_path):
    said = workers.run(prune_in_vain, tmp_path)[0]
    old = tmp_path / "checkpoints" / "iteration-1.partial"
    assert f"warning: cannot remove {old}: Directory not empty; the next save tries again" in said
    assert "iteration-1.partial iteration-2 iteration-3 latest" in said
    assert [one.name for one in checkpoints_in(tmp_path)] == ["iteration-3", "iteration-4"] and not old.exists()


def test_a_checkpoint_that_was_read_is_not_held(workers, tmp_path):
    workers.run(fail_to_write, tmp_path, 9, 60.0)  # nobody fails
    checkpoint = Checkpoint.open(tmp_path / "checkpoints" / "latest")
    reader = checkpoint.open_reader()
    values = reader.read("actor", "w", "main", Place.whole((400,))).clone()
    assert str(checkpoint.folder) in Path("/proc/self/maps").read_text()
    del reader
    assert str(checkpoint.folder) not in Path("/proc/self/maps").read_text()
    assert torch.equal(values, torch.arange(100.0).repeat(4))
