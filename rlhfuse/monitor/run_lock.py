"""A run directory has one owner: run.lock holds the process that writes there, and goes when that ends in order.

A dead owner's lock is taken over: on its own machine at once, where pid and start time tell; from elsewhere when it is
not renewed for DEAD_AFTER_SECONDS, watched by the storage's clock, so that no two clocks need to agree.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from rlhfuse.base.errors import InputError, writing
from rlhfuse.base.files import UNDER_WAY
from rlhfuse.monitor.heartbeat import ProcessName

RUN_LOCK = "run.lock"
RENEW_SECONDS = 5.0
DEAD_AFTER_SECONDS = 60.0


class RunLock:
    """Held by this process in a `with` block; a thread renews it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file, self._own = folder, folder / RUN_LOCK, ProcessName.own()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)

    def __enter__(self) -> RunLock:
        """Raises InputError while another process owns the folder."""
        with writing(self._file):
            while not self._create():
                self._take_away(self._await_end())
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(RENEW_SECONDS)
        with suppress(OSError):  # what stays is the lock of a dead process
            if self._owner() == self._own:
                self._file.unlink()

    def check(self) -> None:
        """Raise InputError if another run has taken the folder, which it may where this one could not renew in time."""
        with writing(self._file):
            if self._owner() != self._own:
                raise InputError(f"{self._file} is no longer of this run: another one has taken {self._folder} over")

    def _create(self) -> bool:
        try:
            with open(self._file, "x") as file:
                file.write(json.dumps(asdict(self._own)) + "\n")
        except FileExistsError:
            return False
        except OSError:
            self._file.unlink(missing_ok=True)  # no room: half a lock would have no owner
            raise
        return True

    def _take_away(self, dead: ProcessName | None) -> None:
        """Remove the lock of `dead` and no other: who took it over meanwhile has put its own in the place."""
        beside = self._file.with_name(f".{RUN_LOCK}.{uuid.uuid4().hex}{UNDER_WAY}")
        with suppress(FileNotFoundError):
            os.rename(self._file, beside)  # only one taker gets it
            if self._owner(beside) != dead:
                with suppress(FileExistsError):
                    os.link(beside, self._file)
            beside.unlink()

    def _owner(self, file: Path | None = None) -> ProcessName | None:
        """Whom the file names; None where it is gone or was never written to its end."""
        try:
            return ProcessName(**json.loads((file or self._file).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _await_end(self) -> ProcessName | None:
        """The owner, once it is known to be dead. Raises InputError when it lives."""
        owner = self._owner()
        who = f"pid {owner.pid} on {owner.host}" if owner else "an unknown process"
        if owner is None or owner.machine != self._own.machine:
            lives = self._is_renewed(who)
        else:
            lives = not owner.is_gone(self._own.machine)
        if lives:
            fix = f"wait for its end or choose another output_dir (if it has ended, delete {self._file})"
            raise InputError(f"{self._folder} belongs to a run that is alive, {who}: {fix}")
        print(f"taking {self._folder} over from {who}, which has ended", flush=True)
        return owner

    def _is_renewed(self, who: str) -> bool:
        """Watch the file until it is renewed, or for so long that its owner must be dead, or until it goes."""
        print(f"{self._file} is of {who}: watching it for up to {DEAD_AFTER_SECONDS:.0f} s", flush=True)
        until, before = time.monotonic() + DEAD_AFTER_SECONDS, self._time()
        while before is not None and time.monotonic() < until:
            time.sleep(RENEW_SECONDS / 5)
            if (now := self._time()) != before:
                return now is not None
        return False

    def _time(self) -> int | None:
        """When the file was written or renewed, in the storage's nanoseconds; None where it is gone."""
        try:
            with open(self._file) as file:  # opened: NFS answers stat from a cache
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(OSError):  # tried again; if it fails for long, `check` finds out
                if self._owner() == self._own:
                    os.utime(self._file)
