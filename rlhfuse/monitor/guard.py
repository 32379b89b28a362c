"""A thread of a rank that hears what asks for its end, and ends it whatever its other threads wait for.

Signals come through Python's wake-up descriptor, which the C-level handler fills whatever the main thread is doing. The
thread never asks the job's store, so a network that is cut does not hold it: what has to be told to the others first
is the watchdog's, and is given up where the store does not answer.
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
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rlhfuse.base.errors import InputError, leave_message, say_at_once
from rlhfuse.base.files import write_text
from rlhfuse.base.launcher import local_rank, patience_seconds
from rlhfuse.monitor.heartbeat import EXIT_STOPPED, INTERRUPTED, TERMINATED, Verdict, process_seconds

TICK_SECONDS = 1.0
SAVE_SECONDS = 20.0  # how long a checkpoint that is being written is waited for at the end of a rank
LOST_SAVE_SECONDS = 5.0  # where a rank is lost whose part it may need
SAME_SIGNAL_SECONDS = 2.0  # a signal may reach a rank twice: from the terminal or batch system, and from its launcher
BEFORE_LAUNCHER_SECONDS = 5.0  # when a rank leaves that its launcher would kill


class AsksStore(Protocol):
    """What talks to the other ranks, in another thread."""

    def leave_with(self, verdict: Verdict) -> None:
        """Tell them, and leave."""

    def unanswered(self, ending: Verdict | None) -> Verdict | None:
        """Why the guard is to end this rank itself, which may be `ending` already: the store owes an answer."""


class Guard:
    """Guards while the main thread, which enters it, is in its block.

    SIGTERM, where a watchdog has it heard, ends this rank at once. SIGUSR1, the notice that the machine will be taken
    away, and the end of the time that the run was given, do so too, and set `stop_asked` alone, as SIGINT does, where
    `finishing` says what is done first. A second signal ends the rank, as does the end of the grace.
    """

    def __init__(
        self,
        rank: int,
        grace_seconds: float,
        stop_after_seconds: float = math.inf,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._rank, self._exit, self._patience = rank, exit_process, patience_seconds()
        by_launcher = self._patience - BEFORE_LAUNCHER_SECONDS
        self._grace, self._limit = min((grace_seconds, "trainer.grace_seconds"), (by_launcher, "--shutdown-timeout"))
        self._deadline = time.monotonic() - process_seconds() + stop_after_seconds
        self._asked, self._until = -math.inf, math.inf  # when the first signal that asks for an end came; its grace
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._noting = threading.Lock()
        self._waits_for_save = self._insists = False
        self.watchdog: AsksStore | None = None
        self.ending: Verdict | None = None  # by which this rank is leaving already
        self.doing = "start"
        self.stop_asked = False
        self.notice = False  # it was asked by what will not be there to start the run again
        self.file: Path | None = None  # rank 0's: tells whoever starts the run again that it is to be
        self.finishing = ""  # what is still done when an end is asked for
        self.go_on = "start the same command again"  # what to do once the job has ended
        self.is_saving: Callable[[], bool] = lambda: False  # a checkpoint, in another thread

    def __enter__(self) -> Guard:
        self._old_handler = signal.getsignal(signal.SIGUSR1)
        if self._old_handler is not signal.SIG_IGN:  # what was ignored at the start stays so
            signal.signal(signal.SIGUSR1, lambda *_: None)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGUSR1])  # blocked while modules load
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._wake_write.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGUSR1, self._old_handler)
        self._wake_read.close()
        self._wake_write.close()

    def seconds_left(self) -> float:
        """What is left of the time that the run was given."""
        return self._deadline - time.monotonic()

    # ---- the thread

    def _run(self) -> None:
        begin = time.monotonic()
        while not self._over.is_set():
            until = math.inf if self.ending else self._until
            received = self._hear(min(TICK_SECONDS, max(0.001, until - begin)))
            begin, watchdog = time.monotonic(), self.watchdog
            if not self.ending and (verdict := self._asked_to_end(received, begin)):
                self.ending = verdict
                if watchdog:
                    watchdog.leave_with(verdict)
                else:
                    self.tell(verdict, prints=self._rank == 0)
                    self.leave(verdict)
            if watchdog and (verdict := watchdog.unanswered(self.ending)):
                self.tell(verdict)
                self.leave(verdict, LOST_SAVE_SECONDS)

    def _hear(self, seconds: float) -> bytes:
        """Sleep; cut short by signals, which it returns, and by the end of the block."""
        self._wake_read.settimeout(seconds)  # as select.select, which refuses descriptors from 1024 on
        received = b""
        with suppress(TimeoutError):
            received = self._wake_read.recv(4096)
        if self._waits_for_save and self._is_asked_again(received, time.monotonic()):
            self._insists = True
        return received

    def _is_asked_again(self, received: bytes, now: float) -> bool:
        return (signal.SIGINT in received or signal.SIGUSR1 in received) and now - self._asked > SAME_SIGNAL_SECONDS

    def _asked_to_end(self, received: bytes, now: float) -> Verdict | None:
        """The verdict where this rank is to leave; notes signals for which something is finished first."""
        if signal.SIGUSR1 in received and not self.stop_asked:  # who stopped the run before does not want it again
            self.notice = True  # also where SIGTERM came before this thread looked
        if signal.SIGTERM in received:
            return Verdict("terminated by SIGTERM", EXIT_STOPPED[TERMINATED])
        why = "SIGUSR1" if signal.SIGUSR1 in received else "trainer.stop_after" if now > self._deadline else ""
        stopped = EXIT_STOPPED[INTERRUPTED]
        if not self.stop_asked and (why or signal.SIGINT in received):
            self._asked, self._until = now, now + self._grace
            self.notice = self.notice or bool(why)
            if self.finishing and local_rank() == 0:
                limit = f"within {self._grace:.0f} s ({self._limit})"
                say_at_once(f"stopping: {self.finishing}, {limit}; Ctrl-C once more ends it now")
            self.stop_asked = True
            if why and not self.finishing:
                return Verdict(f"stopped by {why} in: {self.doing}", stopped)
            if why:
                self.note(f"stopped by {why}: {self.finishing}; {self.go_on}")
        elif self.stop_asked and self._is_asked_again(received, now):
            return Verdict(f"interrupted before the end of: {self.finishing or self.doing}", stopped)
        elif now > self._until:
            late = f"not done in time, {self._grace:.0f} s ({self._limit})"
            return Verdict(f"{late}: {self.finishing or self.doing}", stopped)
        return None

    # ---- the end of this rank

    def tell(self, verdict: Verdict, prints: bool = True) -> None:
        """Say why this rank leaves: in torchrun's table, where there is one, and on the screen if it `prints`."""
        text = f"{verdict.report}; this is rank {self._rank}, which was in: {self.doing}"
        whole = f"{text}; {self.go_on}"
        if self.notice:
            self.note(f"{verdict.report}; the last whole checkpoint stands; {self.go_on}")
        if not leave_message(whole) or prints:
            # torchrun makes no table of ranks that it stops itself, so all is said here
            say_at_once(f"watchdog: {whole if verdict.exit_code in EXIT_STOPPED.values() else text}")

    def leave(self, verdict: Verdict, save_seconds: float = SAVE_SECONDS) -> None:
        """End the process from a thread: the main thread cannot be asked."""
        self.wait_for_save(save_seconds)
        self._exit(verdict.exit_code)

    def wait_for_save(self, seconds: float) -> None:
        """Return when this rank's part of a checkpoint is on disk, or cannot be, or somebody insists on the end."""
        until = time.monotonic() + seconds
        if self.stop_asked:
            until = min(until, self._asked + self._patience - 1)
        self._waits_for_save = True
        wait = self._hear if threading.current_thread() is self._thread else time.sleep
        while self.is_saving() and time.monotonic() < until and not self._insists:
            wait(0.05)

    # ---- what tells that the run is to be started again

    def note(self, text: str) -> None:
        """Write it into the file, if this is rank 0."""
        with self._noting:
            if self.file:
                try:
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    write_text(self.file, f"{text}\n", durable=True)
                except (InputError, OSError) as error:
                    say_at_once(f"warning: {error}")

    def forget(self) -> None:
        """The run is finished: there is no such file from now on."""
        with self._noting:
            if self.file:
                self.file.unlink(missing_ok=True)
            self.file = None
