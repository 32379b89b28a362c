"""Ranks as processes of a test's own, which may die, for tests of what the others then do and say.

`work(rank, store, folder, *arguments)` runs on each in one gloo group, with a connection to the job's store that
nothing else uses. What a rank writes to stderr is kept.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testkit.programs import TIMEOUT_SECONDS, eventually
from testkit.workers import forkserver, host_store, join


class OwnRanks:
    """Started at once; a context manager that ends what is left."""

    def __init__(self, world: int, folder: Path, work: Callable[..., None], *arguments: Any) -> None:
        self.store = host_store()  # as a launcher's
        self._folder = folder
        shared = world, self.store.port, folder, work, arguments
        self.ranks = [forkserver().Process(target=_rank, args=(rank, *shared)) for rank in range(world)]
        for process in self.ranks:
            process.start()

    def __enter__(self) -> OwnRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def await_files(self, name: str) -> None:
        """Wait until every rank has made its file of that name."""
        world = range(len(self.ranks))
        eventually(lambda: all((self._folder / f"{name}{rank}").exists() for rank in world), lambda: self.texts)

    def exit_codes(self, *ranks: int) -> list[int | None]:
        """Exit codes of these ranks, or of all, once they have ended."""
        chosen = [self.ranks[rank] for rank in ranks] or self.ranks
        for process in chosen:
            process.join(TIMEOUT_SECONDS)
        return [process.exitcode for process in chosen]

    @property
    def texts(self) -> list[str]:
        """What each rank wrote to stderr so far."""
        files = [self._folder / f"stderr{rank}" for rank in range(len(self.ranks))]
        return [file.read_text() if file.exists() else "" for file in files]


class StoodClock:
    """A clock for a watchdog, in the place of its module `time`, which stands still until `begun()`."""

    def __init__(self, begun: Callable[[], bool]) -> None:
        self._begun, self._start = begun, 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        if not self._start and self._begun():
            self._start = time.monotonic()
        return time.monotonic() - self._start if self._start else 0.0


def _rank(rank: int, world: int, port: int, folder: Path, work: Callable[..., None], arguments: tuple) -> None:
    sys.stderr.flush()
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    join(port, rank, world)
    work(rank, dist.TCPStore("127.0.0.1", port), folder, *arguments)
