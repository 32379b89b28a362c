"""Writing a checkpoint is progress, piece by piece; what keeps it from being written ends all ranks with its cause."""

import io
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testkit.programs import eventually
from testkit.small_disk import small_files
from testkit.tiny import write_checkpoint
from testkit.writing import STATE, part_of, writer_of, writing_by

from rlhfuse.base.errors import InputError, JointError
from rlhfuse.models.hf_folder import write_folder
from rlhfuse.monitor.guard import Guard
from rlhfuse.monitor.heartbeat import Limits
from rlhfuse.monitor.watchdog import Watchdog
from rlhfuse.parallel.fragments import Place
from rlhfuse.run.checkpoint import writer as checkpoint_writer
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, checkpoints_in
from rlhfuse.run.checkpoint.shard_files import file_name
from rlhfuse.run.checkpoint.writer import CheckpointWriter

LARGE = 100_000  # elements of a rank


class LeapingClock:
    """Every time it is asked an hour has passed."""

    def __init__(self) -> None:
        self.hours, self.leapt = 0, threading.Event()

    def monotonic(self) -> float:
        self.hours += 1
        if self.hours > 3:
            self.leapt.set()
        return 3600.0 * self.hours


def message_of(writer: CheckpointWriter, rank: int, iteration: int, size: int, inside: Callable = lambda: None) -> str:
    """What is raised as a checkpoint is written; `inside()` is done while it is under way."""
    try:
        writer.start(iteration, STATE, part_of(rank, size=size))
        with writer.joint_failure():
            inside()
        writer.finish()
        return "nothing was raised"
    except JointError as error:
        return str(error)


def fail(rank: int, out: Path, how: str, size: int = 100) -> str:
    """The message of checkpoint 2, after 1 was written, with one fault.

    allocator N  rank N's refuses while it writes its file; "late": when rank 0 would wait for files no longer, were it
                 to count from the start
    full         the system refuses rank 2 files of more than 50 kB
    stale        rank 0's storage fails while it looks for the file of rank 2
    alone        rank 0 cannot write a line of its own while rank 3 writes, and is the last to give that up
    """
    writer, is_file, clock = writer_of(rank, out), Path.is_file, LeapingClock()
    assert message_of(writer, rank, 1, size) == "nothing was raised"
    give_up, partial = writer._abandoned.set, out / "checkpoints" / "iteration-2.partial"

    def write(real, *given):
        if how.startswith(f"allocator {rank}"):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if how == "alone" and rank == 3:
            assert writer._abandoned.wait(540), "checkpoint 2 is under way until it is given up"
        return real(*given)

    def stale(file: Path) -> bool:
        if how == "stale" and rank == 0 and file.name == "rank-2.json":
            raise OSError(116, os.strerror(116), str(file))
        return is_file(file)

    def inside() -> None:
        if rank == 0 and how == "alone":
            raise InputError("cannot write lines")
        if rank == 0 and how.endswith("late"):
            assert clock.leapt.wait(540), "rank 0 looks for the files of others"

    with ExitStack() as stack:
        stack.enter_context(writing_by(write))
        stack.enter_context(mock.patch.object(Path, "is_file", stale))
        if how == "full" and rank == 2:
            stack.enter_context(small_files(50_000))
        if how == "alone" and rank == 0:
            writer._abandoned.set = lambda: (eventually((partial / file_name(3)).exists), give_up())
        if how.endswith("late") and rank == 0:
            stack.enter_context(mock.patch.object(checkpoint_writer, "time", clock))
        return message_of(writer, rank, 2, size, inside)


ALLOCATOR = "cannot write {partial}/rank-{rank}.safetensors: RuntimeError: DefaultCPUAllocator: can't allocate memory"
FULL = "rank 2: cannot write {partial}/rank-2.safetensors: File too large; free space there"


@pytest.mark.parametrize(
    "how, size, said",
    [
        ("allocator 0", 100, "rank 0: " + ALLOCATOR.replace("{rank}", "0")),
        ("allocator 2", 100, "rank 2: " + ALLOCATOR.replace("{rank}", "2")),
        ("allocator 2 late", 100, "rank 2: " + ALLOCATOR.replace("{rank}", "2")),
        ("full", LARGE, FULL),
        ("stale", 100, "rank 0: cannot read {partial}/rank-2.json: Stale file handle"),
        ("alone", 100, "cannot write lines"),
    ],
)
def test_what_one_rank_cannot_write_ends_all_ranks_and_leaves_the_last_good_one(workers, tmp_path, how, size, said):
    folder = tmp_path / "checkpoints"
    messages = workers.run(fail, tmp_path, how, size)
    said = said.replace("{partial}", str(folder / "iteration-2.partial"))
    good = f"{said}; the last good checkpoint is {folder / 'iteration-1'}: start again with trainer.resume=auto"
    assert messages == [good] * 4
    assert sorted(one.name for one in folder.iterdir()) == ["iteration-1", "latest"]
    whole = Checkpoint.open(folder / "latest").open_reader().whole("actor", "w")
    assert torch.equal(whole, torch.arange(float(size)).repeat(4))


def write_each_to_its_own(rank: int, out: Path) -> str:
    """Every rank has an `out` that the others do not see. Returns what this rank's error says."""
    return message_of(writer_of(rank, out / str(rank), seconds=0.2), rank, 1, 100)


def test_ranks_that_share_no_storage_are_told_so(workers, tmp_path):
    messages = workers.run(write_each_to_its_own, tmp_path)
    words = "rank 0: no file of rank 1 after 0 s: output_dir must be storage all nodes share; no checkpoint was saved"
    assert all(message.startswith(words) for message in messages), messages


def last_good_while_rank_0_commits(rank: int, out: Path, succeeds: bool) -> str:
    """Rank 0 commits, or fails to, when all others have asked for the last good checkpoint."""
    writer, asked = writer_of(rank, out), out / "asked"
    commit = writer._commit

    def late(*arguments):
        eventually(lambda: len(list(asked.glob("*"))) == 3)
        if not succeeds:
            raise OSError(28, os.strerror(28))
        return commit(*arguments)

    writer._commit = late
    writer.start(1, STATE, part_of(rank))
    if rank:
        asked.mkdir(exist_ok=True)
        (asked / str(rank)).touch()
    return writer.last_good(600 if succeeds else 0.1)


@pytest.mark.parametrize("succeeds", [True, False])
def test_every_rank_names_the_checkpoint_that_is_being_committed(workers, tmp_path, succeeds):
    """Nobody waits for long where rank 0 will never complete it."""
    said = workers.run(last_good_while_rank_0_commits, tmp_path, succeeds)
    good = f"the last good checkpoint is {tmp_path / 'checkpoints' / 'iteration-1'}"
    assert said == [f"{good if succeeds else 'no checkpoint was saved'}: start again with trainer.resume=auto"] * 4


def prune_in_vain(rank: int, out: Path) -> str:
    """Four checkpoints, of which two stay; the first cannot be removed when its turn comes, but then it can."""
    writer, rmtree = writer_of(rank, out), shutil.rmtree
    said = io.StringIO()

    def busy(folder, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, os.strerror(39), str(folder))

    for iteration in (1, 2, 3, 4):
        with mock.patch.object(shutil, "rmtree", busy if iteration == 3 else rmtree), redirect_stdout(said):
            writer.start(iteration, STATE, part_of(rank))
            writer.finish()
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
    assert workers.run(fail, tmp_path, "nothing") == ["nothing was raised"] * 4
    checkpoint = Checkpoint.open(tmp_path / "checkpoints" / "latest")
    reader = checkpoint.open_reader()
    values = reader.read("actor", "w", "main", Place.whole((400,))).clone()
    assert str(checkpoint.folder) in Path("/proc/self/maps").read_text()
    del reader
    assert str(checkpoint.folder) not in Path("/proc/self/maps").read_text()
    assert torch.equal(values, torch.arange(100.0).repeat(4))


# slow storage is no hang


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
        watchdog._stopping.set()
        ended.set()

    class Store(dict):
        def set(self, key, value):
            self[key] = value

        def check(self, keys):
            return True

    guard = Guard(0, 540, exit_process=leave)
    watchdog = Watchdog(Store(), 0, 1, Limits(), guard)
    with writing_by(slow), guard, watchdog:
        writer = start_one(tmp_path)
        guard.is_saving = lambda: (asked.set(), writer.is_saving())[1]
        assert begun.wait(540)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(540) and not left
        release.set()
        assert ended.wait(540)
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
