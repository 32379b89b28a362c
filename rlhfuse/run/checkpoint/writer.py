"""Asynchronous save: copy to host, write in a thread, rename to commit.

`start` copies what a rank owns and goes on; its thread writes `iteration-N.partial`. Rank 0's thread waits for all
files, writes the manifest and renames the folder. Threads talk through files alone, so they never meet the collectives
of the running iteration. A crash at any moment leaves the checkpoint before.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhfuse.base.clock import Clock, Piece
from rlhfuse.base.errors import InputError, JointError, writing
from rlhfuse.base.files import sync, write_text
from rlhfuse.parallel.collectives import all_gather_objects, ask_rank_0, raise_on_all_ranks
from rlhfuse.parallel.fragments import Fragment
from rlhfuse.run.checkpoint.checkpoint import MANIFEST, Manifest, RunState, checkpoints_in, folder_of
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.checkpoint.shard_files import FileFacts, file_name, write_rank_file

POLL_SECONDS = 0.02
GROWTH_SECONDS = 0.2

T = TypeVar("T")
Answer = TypeVar("Answer")


class CheckpointWriter:
    """One rank's part in saving; `start`, `joint_failure`, `meet` and `finish` are collectives of all ranks."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        facts: RunCompatibility,
        keep: int,
        timeout_seconds: float,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`keep`: how many checkpoints stay. `timeout_seconds`: rank 0 waits so long to see files that are written."""
        self._run_dir, self._rank, self._world_size = run_dir, rank, world_size
        self._facts, self._keep, self._timeout = facts, keep, timeout_seconds
        self._progress = progress  # told that a file grows while it is waited for
        self._thread: threading.Thread | None = None
        self._partial = folder_of(run_dir)  # of the checkpoint that was begun last, until that is complete
        self._written = threading.Event()  # this rank's file is down, or will never be
        self._written.set()
        self._all_written = threading.Event()  # every rank's file is down
        self._abandoned = threading.Event()  # nobody waits for what is under way
        self._problem = ""
        self._committing = threading.Lock()  # rank 0: whoever has it may give a manifest its words
        self._state: RunState | None = None  # rank 0: of the checkpoint that was begun last

    def start(
        self, iteration: int, state: RunState, roles: Mapping[str, Sequence[Fragment]], best: int | None = None
    ) -> None:
        """Begin to write checkpoints/iteration-N, after `finish`; `roles` may change when this returns.

        The checkpoint of iteration `best` stays, however old it is.
        """
        self.finish()
        saving = Clock().begin()
        self._state, self._partial = state, folder_of(self._run_dir) / f"iteration-{iteration}.partial"
        self._written.clear()
        self._all_written.clear()
        try:
            copies = {role: [fragment.to_host() for fragment in fragments] for role, fragments in roles.items()}
        except BaseException:
            self._written.set()  # never, that is
            raise
        self._thread = threading.Thread(
            target=self._run, args=(iteration, copies, saving, saving.seconds, best), name="checkpoint", daemon=True
        )
        self._thread.start()

    def complete(self, iteration: int, position: Mapping[str, Any]) -> None:
        """Rank 0: the checkpoint of `iteration`, on disk or under way, has this `position` from now on.

        So it can be begun before all that it says is known. Raises InputError naming the file.
        """
        file = folder_of(self._run_dir) / f"iteration-{iteration}" / MANIFEST
        with self._committing:
            if file.exists():
                written = Manifest.parse(file.read_text(encoding="utf-8"), str(file))
                state = replace(written.state, position=position)
                write_text(file, replace(written, state=state).to_text(), durable=True)
            elif self._state:
                self._state = replace(self._state, position=position)

    def is_saving(self) -> bool:
        """Whether this rank's part is under way: its file, and on rank 0 the whole checkpoint. No collective."""
        commits = self._rank == 0 and self._thread is not None and self._thread.is_alive()
        return commits or not self._written.is_set()

    @contextmanager
    def joint_failure(self) -> Iterator[None]:
        """A block that writes. If a rank raises InputError in it, or cannot save, all leave by the same JointError.

        It names the file and the last good checkpoint. The one under way is dropped.
        """
        with self._dropping(), raise_on_all_ranks():
            yield
            if self._problem:
                raise InputError(self._problem)

    def meet(self, value: T, answer: Callable[[list[T]], Answer]) -> Answer:
        """Rank 0's `answer`, which writes, to the value of each rank (`ask_rank_0`); fails as `joint_failure` does."""

        def checked(pairs: list[tuple[T, str]]) -> Answer:
            found = answer([value for value, _ in pairs])
            if problem := next(filter(None, (problem for _, problem in pairs)), ""):
                raise InputError(problem)
            return found

        with self._dropping():
            return ask_rank_0((value, self._problem), checked)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """A JointError of the block names the last good checkpoint; the one under way is dropped. A collective."""
        try:
            yield
        except JointError as error:
            self._abandoned.set()
            if self._thread is not None:
                self._thread.join()
            all_gather_objects(None)  # nobody writes any more
            if self._rank == 0:
                for partial in folder_of(self._run_dir).glob("*.partial"):
                    shutil.rmtree(partial, ignore_errors=True)
            raise JointError(f"{error}; {self.last_good()}") from None

    def last_good(self, commit_seconds: float = 0.0) -> str:
        """Where to go on after an error, as a message; waits for this rank's file of the checkpoint under way.

        Rank 0, which may have failed, is given `commit_seconds` more to complete it.
        """
        if self._thread is not None:
            self._thread.join(self._timeout)
            until = time.monotonic() + commit_seconds
            while self._partial.exists() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        left = checkpoints_in(self._run_dir)
        where = f"the last good checkpoint is {left[-1]}" if left else "no checkpoint was saved"
        return f"{where}: start again with trainer.resume=auto"

    def finish(self) -> None:
        """Wait until the checkpoint under way is complete, if there is one. Raises JointError as above."""
        if self._thread is not None:
            with self.joint_failure():
                self._wait_for_file()
            self._all_written.set()
            with self.joint_failure():
                self._thread.join()
            self._thread = None

    def _wait_for_file(self) -> None:
        """Until this rank's file is down: slow storage is no hang while the file grows."""
        size, mine = -1, f"iteration-*.partial/{file_name(self._rank)}"
        while not self._written.wait(GROWTH_SECONDS):
            with suppress(OSError):
                if size != (size := sum(file.stat().st_size for file in folder_of(self._run_dir).glob(mine))):
                    self._progress(f"saving a checkpoint: {size / 1e6:.1f} MB are written here")

    # the thread -----------------------------------------------------------------------------------------------

    def _run(
        self,
        iteration: int,
        copies: Mapping[str, Sequence[Fragment]],
        saving: Piece,
        copied: float,
        best: int | None,
    ) -> None:
        done = folder_of(self._run_dir) / f"iteration-{iteration}"
        partial = done.with_name(f"{done.name}.partial")
        file = partial / file_name(self._rank)
        try:
            with writing(partial):
                partial.mkdir(parents=True, exist_ok=True)
            with writing(file):
                mine = write_rank_file(partial, self._rank, copies)
            if self._abandoned.is_set():  # rank 0 may not know yet
                return
            write_text(_note(partial, self._rank), json.dumps(asdict(mine)))
            self._written.set()
            file = partial / MANIFEST
            if self._rank == 0 and (files := self._gather(partial)):
                with writing(file), self._committing:
                    assert self._state is not None, "given before the thread began"
                    size = self._commit(partial, done, Manifest(iteration, self._facts, self._state, files))
                told = f"{size / 1e6:.1f} MB in {saving.seconds:.2f} s, {copied:.2f} s of it in the step"
                print(f"saved checkpoints/{done.name}: {told}", flush=True)
                self._prune(best)
        except InputError as error:
            self._problem = f"rank {self._rank}: {error}"
        except BaseException as error:  # a thread's error is seen by nobody: the job has to end by it
            traceback.print_exc()
            self._problem = f"rank {self._rank}: cannot write {file}: {type(error).__name__}: {error}"
        finally:
            self._written.set()

    def _gather(self, partial: Path) -> tuple[FileFacts, ...]:
        """All ranks' files, once they are there; none when one will not come. Raises InputError.

        The time runs from when all are written: before that, a rank that fails says why itself.
        """
        files, until = [], time.monotonic() + self._timeout
        for rank in range(self._world_size):
            note = _note(partial, rank)
            try:
                while not note.is_file():
                    if self._abandoned.wait(POLL_SECONDS):
                        return ()
                    if not self._all_written.is_set():
                        until = time.monotonic() + self._timeout
                    elif time.monotonic() > until:
                        waited = f"no file of rank {rank} after {self._timeout:.0f} s"
                        raise InputError(f"{waited}: output_dir must be storage all nodes share")
                files.append(FileFacts(**json.loads(note.read_text())))
            except OSError as error:
                raise InputError(f"cannot read {note}: {error.strerror or error}") from None
        return tuple(files)

    def _commit(self, partial: Path, done: Path, manifest: Manifest) -> int:
        """Give the folder its name; returns the bytes of its files."""
        for rank in range(self._world_size):
            _note(partial, rank).unlink()
        (partial / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
        sync(partial / MANIFEST)
        sync(partial)
        os.replace(partial, done)
        sync(done.parent)
        sync(self._run_dir)
        write_text(done.parent / "latest", done.name + "\n", durable=True)
        return sum(file.size_bytes for file in manifest.files)

    def _prune(self, best: int | None) -> None:
        """Drop old checkpoints but for the best, and what is left of those that could not be removed before."""
        folder = folder_of(self._run_dir)
        for old in [*checkpoints_in(self._run_dir)[: -self._keep], *folder.glob("iteration-*.partial")]:
            if old.name == f"iteration-{best}":
                continue
            try:
                _remove(old)
            except OSError as error:
                told = f"cannot remove {_removal_name(old)}: {error.strerror or error}; the next save tries again"
                print(f"warning: {told}", flush=True)


def rewind(run_dir: Path, iteration: int) -> list[str]:
    """Remove what a run that continues with `iteration` is going to make again; returns the names. Rank 0 alone.

    Raises InputError naming the folder that cannot be removed.
    """
    late = [folder for folder in checkpoints_in(run_dir) if int(folder.name.partition("-")[2]) > iteration]
    stale = [*late, *folder_of(run_dir).glob("iteration-*.partial")]
    for folder in stale:
        with writing(folder):
            _remove(folder)
    if left := checkpoints_in(run_dir):
        write_text(folder_of(run_dir) / "latest", left[-1].name + "\n", durable=True)
    else:
        (folder_of(run_dir) / "latest").unlink(missing_ok=True)
    (run_dir / "finished.json").unlink(missing_ok=True)
    return sorted(folder.name for folder in stale)


def mark_finished(run_dir: Path, iterations: int) -> None:
    """Say that all iterations and the export are done; rank 0 alone, as its last act."""
    write_text(run_dir / "finished.json", json.dumps({"iterations": iterations}) + "\n", durable=True)


def _note(partial: Path, rank: int) -> Path:
    """What rank R says of its file once that is down."""
    return partial / f"rank-{rank}.json"


def _removal_name(folder: Path) -> Path:
    """The name under which a checkpoint is removed: half removed, it must not look like one."""
    return folder.with_name(f"{folder.name.removesuffix('.partial')}.partial")


def _remove(folder: Path) -> None:
    if (renamed := _removal_name(folder)) != folder:
        shutil.rmtree(renamed, ignore_errors=True)
        os.replace(folder, renamed)
    shutil.rmtree(renamed)
