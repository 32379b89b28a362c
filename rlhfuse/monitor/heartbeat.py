"""What ranks tell each other about themselves, and the reasons to end the job that follow from it.

A `Heartbeat` is a line of JSON in the job's store. `counter` grows with every beat of the watchdog's thread, `progress`
with every piece of work that the main thread reports, but not while it waits for others. A job in which no rank has
worked for `hang_seconds` hangs: who idles or waits hides nobody who is stuck, and who works is waited for.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

RUNNING, DONE, TERMINATED, INTERRUPTED, FAILED, LEFT = "running", "done", "terminated", "interrupted", "failed", "left"
STUCK_SECONDS = 20.0  # of waiting by all ranks with nothing under way that could end it; at most `hang_seconds`
STUCK_AT_MOST = 4  # ranks in the line about a hang
PLACES_AT_MOST = 64  # ranks in the list of places
EXIT_DEAD_PEER = 1
EXIT_STOPPED = {INTERRUPTED: 130, TERMINATED: 143}
STATES = {EXIT_DEAD_PEER: LEFT} | {code: state for state, code in EXIT_STOPPED.items()}  # told on leaving


@dataclass(frozen=True)
class ProcessName:
    """A process, unique over hosts, boots and reuse of pids."""

    host: str
    machine: str  # host, boot and process namespace: only within one can a pid be looked up
    pid: int
    started: str  # the kernel's start time

    @staticmethod
    def own() -> ProcessName:
        status = process_status(os.getpid())
        assert status is not None, "this process runs"
        host, boot = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return ProcessName(host, f"{host} {boot} {os.readlink('/proc/self/ns/pid')}", os.getpid(), status[1])

    def is_gone(self, machine: str) -> bool:
        """Whether the process is known to have ended; never true of a process on another machine."""
        if self.machine != machine:
            return False
        status = process_status(self.pid)
        return status is None or status[0] in "ZX" or status[1] != self.started

    def is_stopped(self, machine: str) -> bool:
        """Whether the process is known to be there, but suspended by a signal or a debugger."""
        return self.machine == machine and (process_status(self.pid) or " ")[0] in ("T", "t")


class Waiting(str):
    """What a rank does while only others can let it go on: no work, and no sign that it is stuck itself.

    It may be in a transfer or a collective, which may take long though all wait in it.
    """


class WaitingForWork(Waiting):
    """What a rank does while its leader asks again and again for work or a decision, which come in no transfer."""


class WaitingOutside(Waiting):
    """What a rank does while something outside of the job lets it wait, as a tool: no work, and it holds others up."""


@dataclass(frozen=True)
class Heartbeat:
    """The latest word of one rank. `because` says why it failed or left."""

    rank: int
    process: ProcessName
    counter: int
    progress: int
    doing: str
    state: str = RUNNING
    because: str = ""
    waiting: bool = False  # for other ranks
    for_work: bool = False
    calls: int = 0  # of a reward function or tools, under way in processes of this rank

    def now_in(self, doing: str) -> Heartbeat:
        """As before, but in `doing`; that is progress unless it is `Waiting`."""
        waits, outside = isinstance(doing, Waiting), isinstance(doing, WaitingOutside)
        progress, for_work = self.progress + (not waits), isinstance(doing, WaitingForWork)
        return replace(self, doing=doing, waiting=waits and not outside, for_work=for_work, progress=progress)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(data: str | bytes) -> Heartbeat:
        raw = json.loads(data)
        return Heartbeat(**{**raw, "process": ProcessName(**raw["process"])})

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid} on {self.process.host})"


@dataclass(frozen=True)
class Limits:
    """Seconds between heartbeats, of silence before a rank counts as dead, and of no work anywhere."""

    watchdog_seconds: float = 60.0
    hang_seconds: float = 600.0
    interval_seconds: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Why this rank leaves, and with which exit code."""

    report: str
    exit_code: int = EXIT_DEAD_PEER


class PeerTable:
    """The latest heartbeat of every peer and since when it has said the same. Decides; does nothing."""

    def __init__(self, own: Heartbeat, limits: Limits, now: float, world_size: int) -> None:
        self._own, self._limits, self._world_size = own, limits, world_size
        self._latest: dict[int, Heartbeat] = {}
        self._changed: dict[int, float] = {}  # when a peer's counter was last seen to grow
        self._read: dict[int, float] = {}  # when a peer was last read
        self._progressed = now  # when any rank's progress was last seen to grow
        self._worked = now  # when any was last seen to do anything but wait, itself or in a call

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return [self._latest[rank] for rank in sorted(self._latest)]

    def note(self, beat: Heartbeat, now: float) -> None:
        """Take in what a peer's key says now."""
        before = self._latest.get(beat.rank)
        if before is None or (beat.counter, beat.state) != (before.counter, before.state):
            self._changed[beat.rank] = now
        self._note_work(before, beat, now)
        self._latest[beat.rank], self._read[beat.rank] = beat, now

    def woke(self, now: float) -> None:
        """This process was not running for a while: what it missed says nothing about the others, whose time begins."""
        self._progressed = self._worked = now
        self._changed = dict.fromkeys(self._changed, now)

    def note_own(self, own: Heartbeat, now: float) -> None:
        self._note_work(self._own, own, now)
        self._own = own

    def _note_work(self, before: Heartbeat | None, beat: Heartbeat, now: float) -> None:
        if before is None or beat.progress != before.progress:
            self._progressed = self._worked = now
        if not beat.waiting or beat.calls:
            self._worked = now

    def verdict(self, now: float) -> Verdict | None:
        """The first reason to leave, the root cause before its consequences; None while all is well."""
        return next(self._reasons(now), None)

    def _reasons(self, now: float) -> Iterator[Verdict]:
        beats = self.heartbeats
        yield from (Verdict(f"{b.because} (found by rank {b.rank})") for b in beats if b.state == LEFT)
        failed = (b for b in beats if b.state == FAILED)
        yield from (Verdict(f"{b} failed with {b.because}; last seen in: {b.doing}") for b in failed)
        yield from (Verdict(f"{b} died; {self.last_word(b, now)}") for b in beats if self._is_gone(b))
        for beat in beats:
            if self._is_silent(beat):
                silence = self._read[beat.rank] - self._changed[beat.rank]
                stopped = beat.process.is_stopped(self._own.process.machine)
                how = "is stopped, by a signal or a debugger: silent" if stopped else "died: silent"
                yield Verdict(f"{beat} {how} for {silence:.0f} s; {self.last_word(beat, now)}")
        stopped = (b for b in beats if b.state in EXIT_STOPPED)
        yield from (Verdict(f"{b} was {b.state} in: {b.doing}", EXIT_STOPPED[b.state]) for b in stopped)
        if (waited := self._all_wait(now)) > min(STUCK_SECONDS, self._limits.hang_seconds):
            idle = f"every rank has waited for others for {waited:.0f} s, and no call is under way"
            yield Verdict(f"the job is stuck: {idle}")
        stuck = now - self._progressed
        if stuck > self._limits.hang_seconds:
            yield Verdict(f"no rank made progress for {stuck:.0f} s; {self._stuck()}")

    def _all_wait(self, now: float) -> float:
        """Seconds up to the oldest sign of life in which all waited, with no transfer or call that could end it."""
        known = [self._own, *self.heartbeats]
        runs = len(known) == self._world_size and all(beat.state == RUNNING for beat in known)
        transfers = not any(beat.for_work for beat in known)  # a collective of all ends after who looks for work comes
        return min(self._changed.values(), default=now) - self._worked if runs and not transfers else 0.0

    def _stuck(self) -> str:
        """Who does not wait for another rank, and so holds the others up."""
        held = [b for b in (self._own, *self.heartbeats) if b.state == RUNNING and not b.waiting]
        named = [f"{beat} is in: {beat.doing}" for beat in sorted(held, key=lambda beat: beat.rank)[:STUCK_AT_MOST]]
        more = [f"and {len(held) - len(named)} more"] if len(held) > len(named) else []
        return ", ".join(named + more) or "all wait for each other"

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.state == RUNNING and beat.process.is_gone(self._own.process.machine)

    def _is_silent(self, beat: Heartbeat) -> bool:
        # by its last reading, not by now: in a large world a peer's turn comes more seldom than the limit
        silence = self._read[beat.rank] - self._changed[beat.rank]
        return beat.state == RUNNING and silence > self._limits.watchdog_seconds

    def last_word(self, beat: Heartbeat, now: float) -> str:
        """Where a rank was when it was last heard, which may not be where it ended."""
        return f"last seen in: {beat.doing} (its word of {now - self._changed[beat.rank]:.1f} s before)"

    def has_lost(self) -> bool:
        """Whether a rank will never do its part again."""
        return any(self._is_gone(beat) or self._is_silent(beat) for beat in self.heartbeats)

    def unheard_since(self, moment: float) -> list[Heartbeat]:
        """Running peers that have shown no sign of life since `moment`."""
        return [beat for beat in self.heartbeats if beat.state == RUNNING and self._changed[beat.rank] <= moment]

    def elsewhere(self, beats: list[Heartbeat]) -> list[Heartbeat]:
        """Those on other machines, where a process cannot be looked up."""
        return [beat for beat in beats if beat.process.machine != self._own.process.machine]

    def still_to_report(self) -> list[Heartbeat]:
        """Live peers that have not said yet where they were when they left."""
        running = (beat for beat in self.heartbeats if beat.state == RUNNING)
        return [beat for beat in running if not self._is_gone(beat) and not self._is_silent(beat)]

    def reporter(self) -> int:
        """The lowest rank that can still print: neither dead nor ended by an error of its own."""
        left = {beat.rank for beat in self.heartbeats if beat.state in (LEFT, TERMINATED)}
        return min({self._own.rank} | left | {beat.rank for beat in self.still_to_report()})

    def places(self) -> str:
        """A line for each peer, in order of rank: what it does, or was last seen in."""
        lines = []
        for beat in self.heartbeats[:PLACES_AT_MOST]:
            seen = "was last seen in" if self._is_gone(beat) else "is in" if beat.state == RUNNING else "was in"
            lines.append(f"  {beat} {seen}: {beat.doing}")
        more = len(self._latest) - len(lines)
        return "\n".join(lines + ([f"  and {more} more ranks"] if more else []))


def process_seconds() -> float:
    """Since the start of this process."""
    status = process_status(os.getpid())
    assert status is not None, "this process runs"
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(status[1]) / os.sysconf("SC_CLK_TCK")


def process_status(pid: int) -> tuple[str, str] | None:
    """(state letter, start time) from /proc/PID/stat, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_name = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return after_name[0], after_name[19]
