"""What a rehearsal saw, phase by phase, in the place of the trainer's own meter, which the trainer tells its phases."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rehearsal.memory import DEVICE, HOST, PINNED
from rehearsal.tensors import FakeCuda

ROWS = 40  # of what held memory at a peak


@dataclass
class PhaseRehearsal:
    """A phase of one iteration; bytes on the device at its peak, with what held them, and in host memory at its end."""

    phase: str
    iteration: int
    peak: int
    host: int
    reserved: int  # the same, page-locked blocks as large as torch takes them
    host_peak: int  # most of it
    seconds: float
    table: list[tuple[str, str, int]] = field(default_factory=list)  # (phase, what, bytes), the largest first
    reads: dict[str, int] = field(default_factory=dict)  # times that the host waited for the device, by place


@dataclass
class RankRehearsal:
    """What came out on one rank. `problems`: as FakeCuda has them; `launches`: of Triton kernels, by name."""

    rank: int
    phases: list[PhaseRehearsal]
    problems: dict[str, int]
    collectives: dict[str, int]
    launches: dict[str, int]
    operations: int
    moved: int  # samples that the rank's instance has sent or received
    paused: int  # and those that have paused for a tool there


class PhaseLog:
    """Has the methods of parallel/memory.py's PhaseMeter."""

    exact, base_bytes = True, 0

    def __init__(self, mode: FakeCuda, progress: Callable[[str], None]) -> None:
        self._mode, self._progress = mode, progress
        self.iteration = 0  # of phases that begin
        self._running = 0
        self._phase: str | None = None
        self._reads: Counter[str] = Counter()
        self._start = 0.0
        self._done: list[PhaseRehearsal] = []

    def switch(self, phase: str | None) -> None:
        """Leave the phase that runs, if any, and begin another, or none. The same again is one phase."""
        if phase == self._phase:
            return
        if self._phase is not None:
            self._leave(self._phase)
        gc.collect()  # what a cycle of references holds would be freed at some other time, in some other phase
        meter = self._mode.meter
        self._phase, self._running, meter.phase = phase, self.iteration, phase or ""
        self._reads, self._start = Counter(self._mode.reads), time.perf_counter()
        meter.reset()

    def note_base(self, held_bytes: int) -> None:
        pass

    def take(self) -> dict[str, int]:
        """Peaks of the phases of this iteration, which ends."""
        self.switch(None)
        return {done.phase: done.peak for done in self._done if done.iteration == self.iteration}

    def outcome(self, rank: int, moved: int, paused: int) -> RankRehearsal:
        mode = self._mode
        problems, collectives, launches = map(dict, (mode.problems, mode.collectives, mode.launches))
        return RankRehearsal(rank, self._done, problems, collectives, launches, mode.operations, moved, paused)

    def _leave(self, phase: str) -> None:
        meter, seconds = self._mode.meter, time.perf_counter() - self._start
        table = [(where, what, count) for (where, what), count in meter.at_peak().most_common(ROWS)]
        done = PhaseRehearsal(
            phase,
            self._running,
            meter.peak[DEVICE],
            meter.host_bytes,
            meter.reserved_bytes,
            meter.peak[HOST] + meter.peak[PINNED],
            seconds,
            table,
            dict(self._mode.reads - self._reads),
        )
        self._done.append(done)
        self._progress(f"iteration {self._running}, {phase}: {done.peak / 2**30:.3f} GiB, {seconds:.1f} s")
