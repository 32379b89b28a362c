"""A thread per rank that ends the job, saying who died and where, when a rank dies, goes silent or hangs.

A main thread that is blocked in a collective never learns that its peer is gone. So each rank's watchdog writes a
heartbeat into the job's store every second, reads those of its peers, and leaves by `os._exit` with the first cause.
A store that does not answer holds this thread up, and not the guard's, which then ends the rank.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Protocol, TypeVar

from rlhfuse.base.errors import JointError, NotFiniteError, Stopped, leave_message, say_at_once
from rlhfuse.monitor.guard import LOST_SAVE_SECONDS, SAVE_SECONDS, Guard
from rlhfuse.monitor.heartbeat import (
    DONE,
    EXIT_DEAD_PEER,
    EXIT_STOPPED,
    FAILED,
    INTERRUPTED,
    PLACES_AT_MOST,
    RUNNING,
    STATES,
    TERMINATED,
    Heartbeat,
    Limits,
    PeerTable,
    ProcessName,
    Verdict,
)

PEERS_PER_TICK = 16  # read at most, in turns, so that the store's load grows linearly with the ranks
GRACE_SECONDS = 3.0  # how long peers may take to show that they live, or to say where they were
ANSWER_SECONDS = 5.0  # how long the store may take to answer a rank that is leaving
ERROR_CHARACTERS = 400  # of an error that the other ranks are told
ASLEEP_SECONDS = 10.0  # after the last of its looks, one of which is due every second
ASLEEP_SHARE = 0.25  # of `watchdog_seconds`: who comes so late was not running, and judges nobody by what it missed
CLOSED = ("refused", "reset", "closed", "Broken pipe")  # in the error of a store that has ended

T = TypeVar("T")


class Store(Protocol):
    """The job's key-value store, through a connection that no other thread uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Watchdog:
    """Watches while the main thread is in its block.

        with Guard(rank, grace_seconds) as guard, Watchdog(store.clone(), rank, world_size, limits, guard) as watchdog:
            watchdog.progress("generation step 12")

    Enter it in the main thread: only there may Python set signal handlers. Leaving it by an exception tells the peers
    that this rank failed. End it after the last barrier: a rank that has left it is not watched any more. From here on
    the guard hears SIGTERM too, and SIGINT raises KeyboardInterrupt where nothing is to be finished first.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limits: Limits, guard: Guard) -> None:
        self._store, self._rank, self._limits, self.guard = store, rank, limits, guard
        # peers in the order of reading: neighbours read different ranks at the same time
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._own = Heartbeat(rank, ProcessName.own(), 0, 0, guard.doing)
        self._table = PeerTable(self._own, limits, time.monotonic(), world_size)
        self.calls_under_way: Callable[[], int] = lambda: 0  # in processes of this rank; the thread asks
        self._stopping = threading.Event()
        self._due = threading.Event()  # the thread is wanted before its next heartbeat
        self._wanted: Verdict | None = None  # the guard's, by which the thread is to leave
        self._asked = math.inf  # when the store was asked what it has not answered yet
        self._lost: Exception | None = None  # the store's first error: a connection that timed out is closed afterwards
        self._looked = self._awake_since = 0.0  # the guard's last look at that, and the first one in turn
        self._counter = 0  # of heartbeats; the thread's, and the main thread's once that has ended
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def progress(self, doing: str) -> None:
        """Say what the main thread does from now on. Cheap: nothing is sent before the next heartbeat.

        That counts as work, unless it is `Waiting`: so tell it of every piece of work, and of no turn of an idle loop.
        """
        self._own = self._own.now_in(doing)
        self.guard.doing = self._own.doing

    def __enter__(self) -> Watchdog:
        heard = {signal.SIGTERM: lambda *_: None, signal.SIGINT: self._interrupt}  # torchrun sends SIGTERM to survivors
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's background job: it stays so
            del heard[signal.SIGINT]
        self._old_handlers = {number: signal.signal(number, handler) for number, handler in heard.items()}
        self._table = PeerTable(self._own, self._limits, time.monotonic(), len(self._peers) + 1)
        self.guard.watchdog = self
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stopping.set()
        self._due.set()
        self._thread.join()
        joint = isinstance(error, JointError | NotFiniteError | Stopped)  # all leave by it: nobody died, nobody waits
        if error is None or joint:
            self._farewell(DONE)
        elif isinstance(error, KeyboardInterrupt):
            self._farewell(INTERRUPTED)
        else:
            self._leave_by_error(f"{type(error).__name__}: {' '.join(str(error).split())[:ERROR_CHARACTERS]}")
            del self._old_handlers[signal.SIGTERM]  # the launcher ends who is left: this rank still has to speak
        if error is not None:
            self.guard.wait_for_save(self._save_seconds())
        self.guard.watchdog = None
        for number, handler in self._old_handlers.items():  # last: SIGTERM would end this rank without a word
            signal.signal(number, handler)

    def _interrupt(self, *_: object) -> None:
        """Answer SIGINT, in the main thread, once that comes to it."""
        if not self.guard.finishing:
            raise KeyboardInterrupt(f"interrupted in: {self._own.doing}; {self.guard.go_on}")

    # ---- the thread

    def _run(self) -> None:
        begin = time.monotonic()
        while not self._stopping.is_set():
            before, begin = begin, time.monotonic()
            if begin - before > self._limits.interval_seconds + ASLEEP_SHARE * self._limits.watchdog_seconds:
                self._table.woke(begin)
            self._counter += 1
            try:
                self._beat()
                verdict = self._look(PEERS_PER_TICK)
            except Exception as error:  # whatever a store raises, it cannot be reached
                verdict = _unreachable(error)
            if verdict and not self._stopping.is_set():
                self._leave(verdict)
            self._due.wait(self._limits.interval_seconds)
            if wanted := self._wanted:
                self._leave(self._terminated() if wanted.exit_code == EXIT_STOPPED[TERMINATED] else wanted)

    def _beat(self) -> None:
        beat = replace(self._own, counter=self._counter, calls=self.calls_under_way())
        self._table.note_own(beat, time.monotonic())
        self._ask(self._store.set, _key(self._rank), beat.to_json())

    def _ask(self, question: Callable[..., T], *words: object) -> T:
        """Ask the store; the guard's thread sees for how long it does not answer. Raises the store's first error."""
        self._asked = time.monotonic()
        try:
            return question(*words)
        except Exception as error:
            self._lost = self._lost or error
            raise self._lost from None
        finally:
            self._asked = math.inf

    def _look(self, peers: int) -> Verdict | None:
        """Read `peers` peers, the next ones in turn, and judge."""
        count, now = len(self._peers), time.monotonic()  # one moment for all, so that a verdict comes out the same
        first = self._counter * peers % count if count > peers else 0
        for rank in (self._peers + self._peers)[first : first + min(peers, count)]:
            self._read(rank, now)
        verdict, before = self._table.verdict(now), None
        while verdict != before:
            # a peer may have said good-bye between its last reading and its end, or another be the cause: a verdict
            # counts once the words of all peers, read after it was first found, still give it
            before = verdict
            for rank in self._peers:
                self._read(rank, now)
            verdict = self._table.verdict(now)
        return verdict

    def _read(self, rank: int, now: float) -> None:
        if self._ask(self._store.check, [_key(rank)]):
            self._table.note(Heartbeat.from_json(self._ask(self._store.get, _key(rank))), now)

    def _terminated(self) -> Verdict:
        """The dead peer that made the launcher send SIGTERM, if there is one."""
        self._farewell(TERMINATED)  # first, so that no peer takes this end for the cause
        try:
            verdict, unheard = self._news(tell=False)
            silent = self._table.elsewhere(unheard)
            if not verdict and silent:
                verdict = Verdict(f"{silent[0]} died; {self._table.last_word(silent[0], time.monotonic())}")
        except Exception as error:
            verdict = Verdict(f"the job's store is gone ({type(error).__name__})", EXIT_STOPPED[TERMINATED])
        return verdict or Verdict("terminated by SIGTERM", EXIT_STOPPED[TERMINATED])

    def _news(self, tell: bool) -> tuple[Verdict | None, list[Heartbeat]]:
        """Read all peers until one gives a reason to leave, or all that run were heard anew, or the grace is over.

        Returns the reason, and the peers that were not heard. `tell` gives them signs of life meanwhile.
        """
        verdict = self._look(len(self._peers))
        arrived = time.monotonic()  # after a reading of all: what is heard from now on is news
        unheard = self._table.unheard_since(arrived)
        while not verdict and unheard and time.monotonic() - arrived < GRACE_SECONDS:
            self._counter += 1
            if tell:
                self._beat()
            time.sleep(0.1)
            verdict = self._look(len(self._peers))
            unheard = self._table.unheard_since(arrived)
        return verdict, unheard

    # ---- for the guard, in its thread

    def leave_with(self, verdict: Verdict) -> None:
        self._wanted = verdict
        self._due.set()

    def unanswered(self, ending: Verdict | None) -> Verdict | None:
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > ASLEEP_SECONDS:  # this process was not running, nor may the store's have been
            self._awake_since = self._looked
        silent = self._looked - max(self._asked, self._awake_since)
        if silent <= (ANSWER_SECONDS if ending else self._limits.watchdog_seconds + GRACE_SECONDS):
            return None
        told = f"the job's store has not answered for {silent:.0f} s: {_cut_off()}"
        return replace(ending, report=f"{ending.report}; {told}") if ending else Verdict(told)

    # ---- the end of this rank

    def _leave(self, verdict: Verdict) -> None:
        """End the process with a word to the others."""
        self.guard.ending = verdict
        self._farewell(STATES[verdict.exit_code], verdict.report)
        # what the lowest rank left prints, all leave for torchrun's table; without torchrun each prints its own
        self.guard.tell(verdict, prints=self._table.reporter() == self._rank or _cut_off() in verdict.report)
        if verdict.exit_code == EXIT_DEAD_PEER:
            self._print_places()
        self.guard.leave(verdict, self._save_seconds())

    def _save_seconds(self) -> float:
        return LOST_SAVE_SECONDS if self._table.has_lost() else SAVE_SECONDS

    def _leave_by_error(self, error: str) -> None:
        """gloo raises as soon as a peer's sockets close, which is before the peer counts as gone: look for it first."""
        try:
            verdict, unheard = self._news(tell=True)
        except Exception as lost:  # an unreachable store has no news
            verdict, unheard = None if _is_closed(lost) else _unreachable(lost), []
        if verdict:  # the error is a consequence, and says nothing
            self._leave(replace(verdict, exit_code=EXIT_DEAD_PEER))
        else:
            silent = [f"; not heard since: {beat}, last seen in: {beat.doing}" for beat in unheard]
            error += "".join(silent[:PLACES_AT_MOST])
            # first: others make the launcher end this
            leave_message(f"error: rank {self._rank}: {error}; {self.guard.go_on}")
            self._farewell(FAILED, error)

    def _farewell(self, state: str, because: str = "") -> None:
        """Write how this rank ended, and return when the store has it. Without a store nobody is left to read it."""
        because = because.partition(" (found by")[0]  # who found it first is not worth a chain
        last = replace(self._own, counter=-1, state=state, because=because)  # a new counter: it counts as heard
        with suppress(Exception):
            self._ask(self._store.set, _key(self._rank), last.to_json())
            # a TCPStore's set is not answered: without this question a peer could see the process gone, read the key
            # before the store has taken the word in, and take this end for the cause
            self._ask(self._store.check, [_key(self._rank)])

    def _print_places(self) -> None:
        """Where every other rank was, once they have said so; on the lowest rank left, so that it is printed once."""
        start = now = time.monotonic()
        if self._table.reporter() != self._rank:
            return
        with suppress(Exception):  # where the store went with the launcher, what was read before must do
            waiting = True
            while waiting:
                # judged before the reading: who has ended by then had said its word before, and is read once more
                waiting = self._table.still_to_report() and now - start < GRACE_SECONDS
                time.sleep(0.05)
                for beat in self._table.heartbeats:
                    if beat.state == RUNNING:
                        self._read(beat.rank, now)
                now = time.monotonic()
        say_at_once(f"watchdog: the other ranks:\n{self._table.places()}")


def _is_closed(error: Exception) -> bool:
    """Whether the store has ended, which closes its connections; a network that is cut closes none."""
    return any(word in str(error) for word in CLOSED)


def _cut_off() -> str:
    return f"this machine ({socket.gethostname()}) is cut off, or the machine of the store is"


def _unreachable(error: Exception) -> Verdict:
    why = "its launcher has died" if _is_closed(error) else _cut_off()
    return Verdict(f"the job's store is unreachable, so {why} ({type(error).__name__}: {str(error)[:80]})")


def _key(rank: int) -> str:
    return f"watchdog/{rank}"
