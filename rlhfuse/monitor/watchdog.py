"""A thread per rank that ends the job, saying who died and where, when a rank dies, goes silent or hangs.

A main thread blocked in a collective never learns that its peer is gone. So every second each rank's watchdog
writes a heartbeat into the job's store and reads those of its peers. It leaves with a report when

    a peer's process on this machine is gone, or the peer wrote that it failed        at once
    a peer's counter stands still                                                     after watchdog_seconds
    no rank reports progress                                                          after hang_seconds
    the store is unreachable (the launcher died), or SIGTERM arrives                  at once

and it leaves by `os._exit`, because the main thread cannot be asked. Who leaves writes why and in what it was, so
that its own end is not taken for the cause; the lowest rank left waits for these words and prints the places of all.
A main thread that fails (gloo raises as soon as a peer's sockets close, which is before the peer counts as gone)
waits for a sign of life of every peer before the error counts as its own. SIGTERM (torchrun sends it to the
survivors) is read from Python's wake-up descriptor, which the C-level handler fills whatever the main thread is
doing. Ctrl-C stays with the main thread.

Each tick reads at most PEERS_PER_TICK peers, in turns, so the store's load grows linearly with the ranks. Knows
nothing of training; the store is any object with `set(key, text)`, `get(key) -> bytes`, `check([keys]) -> bool`,
used by no other thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from rlhfuse.errors import JointError
from rlhfuse.monitor.heartbeat import (
    DONE,
    FAILED,
    INTERRUPTED,
    LEFT,
    RUNNING,
    TERMINATED,
    Heartbeat,
    ProcessName,
)

PEERS_PER_TICK = 16
GRACE_SECONDS = 3.0  # how long peers may take to show that they live, or to say where they were
ERROR_CHARACTERS = 400  # of an error that the other ranks are told
PLACES_AT_MOST = 64  # ranks in the list of places; every rank prints its own place besides
EXIT_DEAD_PEER, EXIT_TERMINATED, EXIT_INTERRUPTED = 1, 143, 130


class Store(Protocol):
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Limits:
    """Seconds between heartbeats, of silence before a rank counts as dead, and of no progress anywhere."""

    watchdog_seconds: float = 60.0
    hang_seconds: float = 600.0
    interval_seconds: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Why this rank leaves, and with which exit code."""

    report: str
    exit_code: int = EXIT_DEAD_PEER


class PeerBook:
    """The latest heartbeat of every peer and since when it has said the same. Decides; does nothing."""

    def __init__(self, own: Heartbeat, limits: Limits, now: float) -> None:
        self._machine = own.process.machine
        self._limits = limits
        self._latest: dict[int, Heartbeat] = {}
        self._changed: dict[int, float] = {}  # when a peer's counter was last seen to grow
        self._progressed = now  # when any rank's progress was last seen to grow
        self._own = own

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return [self._latest[rank] for rank in sorted(self._latest)]

    def note(self, beat: Heartbeat, now: float) -> None:
        """Take in what a peer's key says now."""
        before = self._latest.get(beat.rank)
        if before is None or (beat.counter, beat.state) != (before.counter, before.state):
            self._changed[beat.rank] = now
        if before is None or beat.progress != before.progress:
            self._progressed = now
        self._latest[beat.rank] = beat

    def note_own(self, own: Heartbeat, now: float) -> None:
        if own.progress != self._own.progress:
            self._progressed = now
        self._own = own

    def verdict(self, now: float) -> Verdict | None:
        """The first reason to leave, the root cause before its consequences; None while all is well."""
        return self._failed() or self._dead(now) or self._stopped_from_outside() or self._hang(now)

    def _failed(self) -> Verdict | None:
        """What a peer that found a cause, or is one, wrote down."""
        for beat in self.heartbeats:
            if beat.state == LEFT:
                return Verdict(f"{beat.because} (found by rank {beat.rank})")
        for beat in self.heartbeats:
            if beat.state == FAILED:
                return Verdict(f"{beat} failed with {beat.because}; last seen in: {beat.doing}")
        return None

    def _stopped_from_outside(self) -> Verdict | None:
        for beat in self.heartbeats:
            if beat.state == INTERRUPTED:
                return Verdict(f"{beat} was interrupted in: {beat.doing}", EXIT_INTERRUPTED)
            if beat.state == TERMINATED:
                return Verdict(f"{beat} was terminated in: {beat.doing}", EXIT_TERMINATED)
        return None

    def _dead(self, now: float) -> Verdict | None:
        for beat in self.heartbeats:
            if self._is_gone(beat):
                return Verdict(f"{beat} died; last seen in: {beat.doing}")
        for beat in self.heartbeats:
            if self._is_silent(beat, now):
                silence = now - self._changed[beat.rank]
                return Verdict(f"{beat} died: silent for {silence:.0f} s; last seen in: {beat.doing}")
        return None

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.state == RUNNING and beat.process.is_gone(self._machine)

    def _is_silent(self, beat: Heartbeat, now: float) -> bool:
        return beat.state == RUNNING and now - self._changed[beat.rank] > self._limits.watchdog_seconds

    def _hang(self, now: float) -> Verdict | None:
        stuck = now - self._progressed
        if stuck <= self._limits.hang_seconds:
            return None
        return Verdict(f"no rank made progress for {stuck:.0f} s")

    def unheard_since(self, moment: float) -> list[Heartbeat]:
        """Running peers that have shown no sign of life since `moment`."""
        return [beat for beat in self.heartbeats if beat.state == RUNNING and self._changed[beat.rank] <= moment]

    def elsewhere(self, beats: list[Heartbeat]) -> list[Heartbeat]:
        """Those on other machines, where a process cannot be looked up."""
        return [beat for beat in beats if beat.process.machine != self._machine]

    def still_to_speak(self, now: float) -> list[Heartbeat]:
        """Live peers that have not said yet where they were when they left."""
        return [
            beat
            for beat in self.heartbeats
            if beat.state == RUNNING and not self._is_gone(beat) and not self._is_silent(beat, now)
        ]

    def reporter(self, now: float) -> int:
        """The lowest rank that can still print: neither dead nor ended by an error of its own."""
        left = {beat.rank for beat in self.heartbeats if beat.state in (LEFT, TERMINATED)}
        return min({self._own.rank} | left | {beat.rank for beat in self.still_to_speak(now)})

    def places(self) -> str:
        """A line for each peer, in order of rank: what it does, or was last seen in."""
        lines = []
        for beat in self.heartbeats[:PLACES_AT_MOST]:
            seen = "was last seen in" if self._is_gone(beat) else "is in" if beat.state == RUNNING else "was in"
            lines.append(f"  {beat} {seen}: {beat.doing}")
        more = len(self._latest) - len(lines)
        return "\n".join(lines + ([f"  and {more} more ranks, each of which prints its own place"] if more else []))


class Watchdog:
    """Watches from `start` to `stop`; use as a context manager in the main thread.

        with Watchdog(store.clone(), rank, world_size, limits) as watchdog:
            watchdog.progress("generation step 12")

    Leaving the block by an exception tells the peers that this rank failed. End the block after the last barrier:
    a rank that has left it is not watched any more. Give the store a timeout near `watchdog_seconds`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        limits: Limits = Limits(),
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._store, self._rank, self._limits, self._exit = store, rank, limits, exit_process
        # peers in the order of reading: neighbours read different ranks at the same time
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._own = Heartbeat(rank, ProcessName.own(), 0, 0, "start")
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._stopping = threading.Event()
        self._counter = 0  # of heartbeats; the thread's, and the main thread's once that has ended
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def progress(self, doing: str) -> None:
        """Say what the main thread does from now on. Cheap: nothing is sent before the next heartbeat."""
        own = self._own
        self._own = replace(own, doing=doing, progress=own.progress + 1)

    def start(self) -> Watchdog:
        """Take over SIGTERM and begin. Call in the main thread: only there may Python set signal handlers."""
        self._old_handler = signal.signal(signal.SIGTERM, lambda *_: None)  # the thread reads the descriptor
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._book = PeerBook(self._own, self._limits, time.monotonic())
        self._beat(0)
        self._thread.start()
        return self

    def stop(self, state: str = DONE, because: str = "") -> None:
        """End watching and write how this rank ended."""
        self._end_thread()
        self._farewell(state, because)
        self._release_signals()

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.stop()
        elif isinstance(error, KeyboardInterrupt):
            self.stop(INTERRUPTED)
        elif isinstance(error, JointError):  # all ranks leave by it: nobody died, and nobody waits
            self.stop()
        else:
            # a collective that raises because its peer died is not the cause: name the peer if it is known
            self._end_thread()
            self._leave_by_error(f"{kind.__name__}: {' '.join(str(error).split())[:ERROR_CHARACTERS]}")
            self._release_signals()  # last: a SIGTERM meanwhile would end this rank without a word

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._counter += 1
            try:
                self._beat(self._counter)
                verdict = self._look(PEERS_PER_TICK, self._counter)
            except Exception as error:  # whatever a store raises, it cannot be reached
                verdict = Verdict(f"the job's store is unreachable, so its launcher has died ({type(error).__name__})")
            if verdict and not self._stopping.is_set():
                self._leave(verdict)
            if self._wait_for_sigterm(self._limits.interval_seconds):
                self._leave(self._terminated(self._counter))

    def _beat(self, counter: int) -> None:
        beat = replace(self._own, counter=counter)
        self._book.note_own(beat, time.monotonic())
        self._store.set(_key(self._rank), beat.to_json())

    def _look(self, peers: int, counter: int) -> Verdict | None:
        """Read `peers` peers, the next ones in turn, and judge."""
        count = len(self._peers)
        first = counter * peers % count if count > peers else 0
        for rank in (self._peers + self._peers)[first : first + min(peers, count)]:
            self._read(rank)
        verdict, before = self._book.verdict(time.monotonic()), None
        while verdict != before:
            # a peer may have said good-bye between its last reading and its end, or another be the cause: a verdict
            # counts once the words of all peers, read after it was first found, still give it
            before = verdict
            for rank in self._peers:
                self._read(rank)
            verdict = self._book.verdict(time.monotonic())
        return verdict

    def _read(self, rank: int) -> None:
        if self._store.check([_key(rank)]):
            self._book.note(Heartbeat.from_json(self._store.get(_key(rank))), time.monotonic())

    def _wait_for_sigterm(self, seconds: float) -> bool:
        """Sleep; True as soon as SIGTERM arrived. `stop` and other signals only cut the sleep short."""
        ready, _, _ = select.select([self._wake_read], [], [], seconds)
        return bool(ready) and signal.SIGTERM in self._wake_read.recv(4096)

    def _terminated(self, counter: int) -> Verdict:
        """The dead peer that made the launcher send SIGTERM, if there is one."""
        self._farewell(TERMINATED, "")  # first, so that no peer takes this end for the cause
        try:
            verdict, unheard = self._news(counter, tell=False)
            silent = self._book.elsewhere(unheard)
            if not verdict and silent:
                verdict = Verdict(f"{silent[0]} died; last seen in: {silent[0].doing}")
        except Exception as error:
            verdict = Verdict(f"the job's store is gone ({type(error).__name__})", EXIT_TERMINATED)
        return verdict or Verdict("terminated by SIGTERM", EXIT_TERMINATED)

    def _news(self, counter: int, tell: bool) -> tuple[Verdict | None, list[Heartbeat]]:
        """Read all peers until one gives a reason to leave, or all that run were heard anew, or the grace is over.

        Returns the reason, and the peers that were not heard. `tell` gives them signs of life meanwhile.
        """
        verdict = self._look(len(self._peers), counter)
        arrived = time.monotonic()  # after a reading of all: what is heard from now on is news
        unheard = self._book.unheard_since(arrived)
        while not verdict and unheard and time.monotonic() - arrived < GRACE_SECONDS:
            counter += 1
            if tell:
                self._beat(counter)
            time.sleep(0.1)
            verdict = self._look(len(self._peers), counter)
            unheard = self._book.unheard_since(arrived)
        return verdict, unheard

    def _leave(self, verdict: Verdict) -> None:
        self._farewell(LEFT if verdict.exit_code == EXIT_DEAD_PEER else TERMINATED, verdict.report)
        self._print(verdict)
        if verdict.exit_code == EXIT_DEAD_PEER:
            self._print_places()
        self._exit(verdict.exit_code)

    # ---- the end of this rank

    def _leave_by_error(self, error: str) -> None:
        verdict, unheard = self._cause_of_error()
        if verdict:
            self._farewell(LEFT, verdict.report)
            self._print(verdict)
            self._print_places()
        else:
            silent = [f"; not heard since: {beat}, last seen in: {beat.doing}" for beat in unheard]
            self._farewell(FAILED, error + "".join(silent[:PLACES_AT_MOST]))

    def _cause_of_error(self) -> tuple[Verdict | None, list[Heartbeat]]:
        """Why the main thread failed, if a peer is the reason. An unreachable store has no news."""
        try:
            return self._news(self._counter, tell=True)
        except Exception:
            return None, []

    def _farewell(self, state: str, because: str) -> None:
        """Write how this rank ended, and return when the store has it. Without a store nobody is left to read it."""
        because = because.partition(" (found by")[0]  # who found it first is not worth a chain
        # a new counter, so that the word counts as heard
        last = replace(self._own, counter=-1, state=state, because=because)
        try:
            self._store.set(_key(self._rank), last.to_json())
            # a TCPStore's set is not answered: without this question a peer could see the process gone, read the key
            # before the store has taken the word in, and take this end for the cause
            self._store.check([_key(self._rank)])
        except Exception:
            return

    def _end_thread(self) -> None:
        self._stopping.set()
        self._wake_write.send(b"\0")
        self._thread.join()

    def _release_signals(self) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGTERM, self._old_handler)
        self._wake_read.close(), self._wake_write.close()

    def _print(self, verdict: Verdict) -> None:
        # os.write: the main thread may be blocked while it holds the lock of sys.stderr
        text = f"watchdog: {verdict.report}; this is rank {self._rank}, which was in: {self._own.doing}\n"
        os.write(2, text.encode())

    def _print_places(self) -> None:
        """Where every other rank was, once they have said so; on the lowest rank left, so that it is printed once."""
        start = now = time.monotonic()
        if self._book.reporter(now) != self._rank:
            return
        try:
            waiting = True
            while waiting:
                # judged before the reading: who has ended by then had said its word before, and is read once more
                waiting = self._book.still_to_speak(now) and now - start < GRACE_SECONDS
                time.sleep(0.05)
                for beat in self._book.heartbeats:
                    if beat.state == RUNNING:
                        self._read(beat.rank)
                now = time.monotonic()
        except Exception:  # the store went with the launcher: what was read before must do
            pass
        os.write(2, f"watchdog: the other ranks:\n{self._book.places()}\n".encode())


def _key(rank: int) -> str:
    return f"watchdog/{rank}"
