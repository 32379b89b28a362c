"""A thread per rank that ends the job, saying who died and where, when a rank dies, goes silent or hangs.

A main thread that is blocked in a collective never learns that its peer is gone. So each rank's watchdog writes a
heartbeat into the job's store every second, reads those of its peers, and leaves by `os._exit` with the first cause.
It hears the signals that ask for an end, too; whichever way a rank ends, a checkpoint that it writes is waited for.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from rlhfuse.base.errors import JointError, NotFiniteError, Stopped, leave_message
from rlhfuse.base.launcher import local_rank
from rlhfuse.monitor.heartbeat import (
    DONE,
    EXIT_DEAD_PEER,
    EXIT_STOPPED,
    FAILED,
    INTERRUPTED,
    LEFT,
    PLACES_AT_MOST,
    RUNNING,
    TERMINATED,
    Heartbeat,
    Limits,
    PeerTable,
    ProcessName,
    Verdict,
)

PEERS_PER_TICK = 16  # read at most, in turns, so that the store's load grows linearly with the ranks
GRACE_SECONDS = 3.0  # how long peers may take to show that they live, or to say where they were
ERROR_CHARACTERS = 400  # of an error that the other ranks are told
ASLEEP_SHARE = 0.25  # of `watchdog_seconds`: who comes so late was not running, and judges nobody by what it missed
SAVE_SECONDS = 20.0  # how long a checkpoint that is being written is waited for at the end of a rank
LOST_SAVE_SECONDS = 5.0  # where a rank is lost whose part it may need
SAME_SIGNAL_SECONDS = 1.0  # Ctrl-C may reach a rank twice: from the terminal, and from its launcher
LAUNCHER_SECONDS, BEFORE_LAUNCHER_SECONDS = 30.0, 5.0  # torchrun's patience with what it stops; when a rank leaves


class Store(Protocol):
    """The job's key-value store, through a connection that no other thread uses."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Watchdog:
    """Watches while the main thread is in its block.

        with Watchdog(store.clone(), rank, world_size, limits) as watchdog:
            watchdog.progress("generation step 12")

    Enter it in the main thread: only there may Python set signal handlers. Leaving it by an exception tells the peers
    that this rank failed. End it after the last barrier: a rank that has left it is not watched any more. Give the
    store a timeout near `watchdog_seconds`.

    Signals: SIGTERM ends this rank at once. SIGINT and SIGUSR1 set `stop_asked` where `finishing` says what is done
    before the end; else SIGINT raises KeyboardInterrupt. A second SIGINT ends the rank like SIGTERM, as does the
    launcher's patience when it is over.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, limits: Limits, exit_process: Callable[[int], None] = os._exit
    ) -> None:
        self._store, self._rank, self._limits, self._exit = store, rank, limits, exit_process
        # peers in the order of reading: neighbours read different ranks at the same time
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._own = Heartbeat(rank, ProcessName.own(), 0, 0, "start")
        self._table = PeerTable(self._own, limits, time.monotonic())
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._stopping = threading.Event()
        self._counter = 0  # of heartbeats; the thread's, and the main thread's once that has ended
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._asked = 0.0  # when the first signal that asks for an end came
        self._until = math.inf  # when the launcher's patience is over
        self.stop_asked = False
        self.finishing = ""  # what is still done when an end is asked for
        self.go_on = "start the same command again"  # what to do once the job has ended
        self.is_saving: Callable[[], bool] = lambda: False  # a checkpoint, in another thread

    def progress(self, doing: str) -> None:
        """Say what the main thread does from now on. Cheap: nothing is sent before the next heartbeat.

        That counts as work, unless it is `Waiting`: so tell it of every piece of work, and of no turn of an idle loop.
        """
        self._own = self._own.now_in(doing)

    def __enter__(self) -> Watchdog:
        # signals are read by the thread from Python's wake-up descriptor, which the C-level handler fills whatever the
        # main thread is doing (torchrun sends SIGTERM to the survivors)
        heard = {signal.SIGTERM: lambda *_: None, signal.SIGUSR1: lambda *_: None, signal.SIGINT: self._interrupt}
        self._old_handlers = {number: signal.signal(number, handler) for number, handler in heard.items()}
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._table = PeerTable(self._own, self._limits, time.monotonic())
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stopping.set()
        self._wake_write.send(b"\0")
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
            self._wait_for_save()
        # last: a SIGTERM meanwhile would end this rank without a word
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake_read.close()
        self._wake_write.close()

    def _interrupt(self, *_: object) -> None:
        """Answer SIGINT, in the main thread, once that comes to it."""
        if not self.finishing:
            raise KeyboardInterrupt(f"interrupted in: {self._own.doing}; {self.go_on}")

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
                verdict = Verdict(f"the job's store is unreachable, so its launcher has died ({type(error).__name__})")
            if verdict and not self._stopping.is_set():
                self._leave(verdict)
            received = self._signals(self._limits.interval_seconds)
            if signal.SIGTERM in received:
                self._leave(self._terminated())
            if verdict := self._asked_to_stop(received):
                self._leave(verdict)

    def _asked_to_stop(self, received: bytes) -> Verdict | None:
        """Note signals that ask for an end; the verdict where it can no longer wait for what is being finished."""
        now = time.monotonic()
        if not self.stop_asked and (signal.SIGINT in received or signal.SIGUSR1 in received):
            self.stop_asked, self._asked, limit = True, now, ""
            if "TORCHELASTIC_RUN_ID" in os.environ:
                patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", LAUNCHER_SECONDS))
                self._until = now + patience - BEFORE_LAUNCHER_SECONDS
                limit = f", within {self._until - now:.0f} s (torchrun's --shutdown-timeout)"
            if self.finishing and local_rank() == 0:
                os.write(2, f"stopping: {self.finishing}{limit}; Ctrl-C once more ends it now\n".encode())
        elif signal.SIGINT in received and now - self._asked > SAME_SIGNAL_SECONDS:
            return Verdict(
                f"interrupted before the end of: {self.finishing or self._own.doing}", EXIT_STOPPED[INTERRUPTED]
            )
        elif now > self._until:
            late = f"not done in time, {self._until - self._asked:.0f} s, before the launcher ends it"
            return Verdict(f"{late}: {self.finishing or self._own.doing}", EXIT_STOPPED[INTERRUPTED])
        return None

    def _beat(self) -> None:
        beat = replace(self._own, counter=self._counter)
        self._table.note_own(beat, time.monotonic())
        self._store.set(_key(self._rank), beat.to_json())

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
        if self._store.check([_key(rank)]):
            self._table.note(Heartbeat.from_json(self._store.get(_key(rank))), now)

    def _signals(self, seconds: float) -> bytes:
        """Sleep; cut short by signals, which it returns, and by the end of the block."""
        self._wake_read.settimeout(seconds)  # as select.select, which refuses descriptors from 1024 on
        with suppress(TimeoutError):
            return self._wake_read.recv(4096)
        return b""

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

    # ---- the end of this rank

    def _leave(self, verdict: Verdict) -> None:
        """End the process from the thread: the main thread cannot be asked."""
        self._farewell(LEFT if verdict.exit_code == EXIT_DEAD_PEER else TERMINATED, verdict.report)
        self._print(verdict)
        self._wait_for_save()
        self._exit(verdict.exit_code)

    def _leave_by_error(self, error: str) -> None:
        """gloo raises as soon as a peer's sockets close, which is before the peer counts as gone: look for it first."""
        try:
            verdict, unheard = self._news(tell=True)
        except Exception:  # an unreachable store has no news
            verdict, unheard = None, []
        if verdict:  # the error is a consequence, and says nothing
            self._leave(replace(verdict, exit_code=EXIT_DEAD_PEER))
        else:
            silent = [f"; not heard since: {beat}, last seen in: {beat.doing}" for beat in unheard]
            error += "".join(silent[:PLACES_AT_MOST])
            leave_message(
                f"error: rank {self._rank}: {error}; {self.go_on}"
            )  # first: others make the launcher end this
            self._farewell(FAILED, error)

    def _wait_for_save(self) -> None:
        """Return when this rank's part of a checkpoint is on disk, or cannot be, or somebody insists on the end."""
        until = time.monotonic() + (LOST_SAVE_SECONDS if self._table.has_lost() else SAVE_SECONDS)
        if self.stop_asked:
            until = min(until, self._until + BEFORE_LAUNCHER_SECONDS - 1)
        while self.is_saving() and time.monotonic() < until and signal.SIGINT not in self._signals(0.05):
            pass

    def _farewell(self, state: str, because: str = "") -> None:
        """Write how this rank ended, and return when the store has it. Without a store nobody is left to read it."""
        because = because.partition(" (found by")[0]  # who found it first is not worth a chain
        # a new counter, so that the word counts as heard
        last = replace(self._own, counter=-1, state=state, because=because)
        with suppress(Exception):
            self._store.set(_key(self._rank), last.to_json())
            # a TCPStore's set is not answered: without this question a peer could see the process gone, read the key
            # before the store has taken the word in, and take this end for the cause
            self._store.check([_key(self._rank)])

    def _print(self, verdict: Verdict) -> None:
        """What the lowest rank left prints, all leave for torchrun's table; without torchrun each prints its own."""
        text = f"{verdict.report}; this is rank {self._rank}, which was in: {self._own.doing}"
        whole = f"{text}; {self.go_on}"
        if not leave_message(whole) or self._table.reporter() == self._rank:
            # os.write: the main thread may be blocked while it holds the lock of sys.stderr. torchrun makes no table
            # of ranks that it stops itself, so all is said here.
            os.write(2, f"watchdog: {text if verdict.exit_code == EXIT_DEAD_PEER else whole}\n".encode())
        if verdict.exit_code == EXIT_DEAD_PEER:
            self._print_places()

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
        os.write(2, f"watchdog: the other ranks:\n{self._table.places()}\n".encode())


def _key(rank: int) -> str:
    return f"watchdog/{rank}"
