"""Processes that make calls of a user's code while generation goes on.

An ordinary function has one call at a time in the main thread of a process; an `async` one has up to ASYNC_AT_ONCE
calls under way in each. Processes, because a function may hold the interpreter, must not slow the engine down, and can
be stopped if it never returns. What became of a call is its `Outcome`: none that fails or is late fails another.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import multiprocessing as mp
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from rlhfuse.base.errors import NO_ROOM, RewardError, end_started
from rlhfuse.base.launcher import SAFE_PATH, end_with_parent

ASYNC_AT_ONCE = 64
POLL_SECONDS = 0.05
GRACE_SECONDS = 1.0  # in which a process ends a late async call, unless another that does not await holds it up
AWAKE_SECONDS = 1.0  # what counts, at most, of the time between two looks: a job that was stopped looks late
TRIES = 3  # of a call, and of a start, which the machine ends
# Signals by which a process ends through its own fault; it is the machine, or somebody, that sends the others.
OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
OF_THE_MACHINE = (*NO_ROOM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
Told = tuple[int, Any, str, float, bool]  # a call's number; its value, what failed, its seconds, whether by the machine


class Callee(Protocol):
    """What each process loads, and calls."""

    @property
    def is_async(self) -> bool: ...

    def about(self, call: Any) -> str:
        """Beginning of a message about a call."""
        ...

    def invoke(self, call: Any) -> Any:
        """What the user's code returns: with `is_async` something to await. May raise anything."""

    def result(self, returned: Any, call: Any) -> Any:
        """The value of what was returned. May raise anything."""

    def failed(self, error: BaseException, call: Any) -> str:
        """A message about what was raised."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What became of a call. `error`: why there is no value; `lost`: the machine failed, TRIES times, not the call."""

    call: Any
    value: Any
    error: str
    seconds: float
    lost: bool = False


@dataclass(eq=False)
class _Worker:
    """A process, as its parent has it. Its clock stands still while it, or this process, is stopped."""

    process: BaseProcess
    pipe: Connection
    ready: bool = False  # it has loaded the callee
    began: dict[int, float] = field(default_factory=dict)  # its calls, and when they began by its clock
    seconds: float = 0.0
    looked: float = 0.0

    def now(self) -> float:
        before, self.looked = self.looked, time.monotonic()
        with suppress(OSError):  # it has ended, or there is no /proc
            if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                return self.seconds
        self.seconds += min(self.looked - before, AWAKE_SECONDS)
        return self.seconds

    def end(self) -> None:
        """End it, and all that it has started; returns when it has ended."""
        assert self.process.pid, "it was started"
        if self.process.exitcode is None:
            end_started(self.process.pid)
        with suppress(OSError):  # it has no group yet, or that is empty
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


class CallPool:
    """Owns `workers` processes that have loaded `load(*arguments)`; what these start ends with them. To be closed.

    A thread attends to them, and replaces those that end. A call is made again where the machine failed, or another
    call in its process. `setting` is the name of `timeout_seconds`, for messages.
    """

    def __init__(
        self, load: Callable[..., Callee], arguments: Sequence[Any], workers: int, timeout_seconds: float, setting: str
    ) -> None:
        self._callee, self._timeout = load(*arguments), timeout_seconds
        self.at_once = ASYNC_AT_ONCE if self._callee.is_async else 1  # calls that a process has under way
        self._late = f"no result after {timeout_seconds:g} s ({setting})"
        self._context = mp.get_context("spawn")  # a fork would copy the engine, its threads and its sockets
        self._load, self._arguments = load, arguments
        self._submitted, self._closing, self._bell = 0, False, os.eventfd(0)
        self._new: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._failure: BaseException | None = None  # of the thread, whose are from here on
        self._calls: dict[int, Any] = {}  # by number, of which the outcome is not known
        self._waiting: list[int] = []  # those that no process has
        self._tries: dict[int, int] = {}
        self._alone: set[int] = set()  # calls that may have ended their process, or another beside them
        self._starts = 0  # processes that ended before they were ready, since one was
        self._workers = [self._begin() for _ in range(workers)]  # they load while prompts are prefilled
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
        self._thread.start()

    def under_way(self) -> int:
        """Calls that have not ended, for any thread to ask."""
        return self._new.qsize() + len(self._calls)

    def submit(self, calls: Sequence[Any]) -> None:
        """Begin them; returns at once."""
        for call in calls:
            self._new.put((self._submitted, call))
            self._submitted += 1
        os.eventfd_write(self._bell, 1)

    def outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        """What calls came to since the last time; waits so long where there may be none yet."""
        found: list[Outcome] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._done.get(timeout=0.0 if found else seconds))
        if self._failure and not found:
            raise self._failure
        return found

    def close(self) -> None:
        """End the processes, and those that the user's code has started."""
        atexit.unregister(self.close)
        self._closing = True
        for worker in [*self._workers]:  # the thread may wait for one
            worker.end()
        self._thread.join()
        for worker in self._workers:
            worker.end()

    # in the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._bell in wait([self._bell, *(worker.pipe for worker in self._workers)], POLL_SECONDS):
                    os.eventfd_read(self._bell)
                while not self._new.empty():
                    number, call = self._new.get()
                    self._calls[number] = call
                    self._waiting.append(number)
                for worker in [*self._workers]:
                    self._attend(worker)
                self._assign()
        except BaseException as failure:  # raised where outcomes are waited for
            self._failure = failure

    def _begin(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, self._load, self._arguments, self._timeout, self._late), name="call worker"
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _assign(self) -> None:
        """Give waiting calls to the processes that have the fewest; one that is to be alone gets one to itself."""
        while self._waiting:
            number, free = self._waiting[0], [worker for worker in self._workers if worker.ready]
            free = [one for one in free if not one.began or not self._alone & {number, *one.began}]
            worker = min(free, key=lambda one: len(one.began), default=None)
            if worker is None or len(worker.began) == self.at_once:
                return
            worker.began[self._waiting.pop(0)] = worker.now()
            with suppress(OSError):  # it has just ended, which is seen next
                worker.pipe.send((number, self._calls[number]))

    def _attend(self, worker: _Worker) -> None:
        """Take in what a process says; replace it where it has ended, cannot go on, or is held up by a late call."""
        code = worker.process.exitcode
        try:
            while worker.pipe.poll():
                if (said := worker.pipe.recv()) is False:
                    return self._replace(worker)
                worker.ready, self._starts = True, 0
                if said is not True:
                    del worker.began[said[0]]
                    self._tell(*said)
        except (EOFError, OSError):
            worker.process.join(GRACE_SECONDS)
            code = worker.process.exitcode or 0
        if code is not None:
            return self._ended(worker, code)
        now = worker.now() if worker.began else 0.0
        over = {number: now - began - self._timeout for number, began in worker.began.items()}
        late = [number for number, seconds in over.items() if seconds > 0]
        if late and (self.at_once == 1 or max(over.values()) > GRACE_SECONDS):
            return self._replace(worker, self._late, self._timeout)
        for number in late:
            with suppress(OSError):
                worker.pipe.send((number, None))

    def _ended(self, worker: _Worker, code: int) -> None:
        """What a process has done to itself is what its call came to."""
        self._starts += not worker.ready
        if self._starts == TRIES:
            raise RewardError(f"processes that load {self._arguments[0]} ended with exit code {code}, {TRIES} times")
        machine = code < 0 and -code not in OWN_SIGNALS
        self._replace(worker, f"its process ended with exit code {code}", 0.0, machine)

    def _replace(self, worker: _Worker, why: str = "", seconds: float = 0.0, machine: bool = False) -> None:
        """End it and begin another; `why`: what its call came to, if it has only one. All else is made again, alone."""
        if why and len(worker.began) == 1:  # of several it is not known which is to blame
            number, _ = worker.began.popitem()
            self._tell(number, None, f"{self._callee.about(self._calls[number])} {why}", seconds, machine)
        worker.end()
        worker.pipe.close()
        self._alone.update(worker.began)
        self._waiting[:0] = worker.began
        self._workers.remove(worker)
        if not self._closing:
            self._workers.append(self._begin())

    def _tell(self, number: int, value: Any, error: str, seconds: float, machine: bool = False) -> None:
        """What a call came to; where the machine failed, it is made again, TRIES times in all."""
        tries = self._tries[number] = self._tries.get(number, 0) + 1
        if machine and tries < TRIES:
            self._waiting.insert(0, number)
            return
        del self._tries[number]
        self._alone.discard(number)
        error += f", {TRIES} times" if machine else ""
        self._done.put(Outcome(self._calls.pop(number), value, error, seconds, machine))


# in the worker --------------------------------------------------------------------------------------------------


def _work(pipe: Connection, load: Callable[..., Callee], arguments: Sequence[Any], timeout: float, late: str) -> None:
    """Load the callee and say True; then make calls as they come, and say what each came to."""
    os.environ.pop(SAFE_PATH, None)  # what the user's code starts is as ever
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a batch system's notice to all processes: an iteration ends first
    _end_with_parent()
    callee = load(*arguments)
    say = partial(_say, pipe, _standard_files())
    pipe.send(True)
    with suppress(EOFError, OSError):  # the parent is gone
        if callee.is_async:
            _AsyncCalls(callee, timeout, late, say).serve(pipe)
        while True:
            number, call = pipe.recv()
            say(_told(callee, number, call, time.monotonic(), partial(callee.invoke, call)))
    _end()


def _say(pipe: Connection, files: Any, told: Told) -> None:
    """Say what a call came to; and False, as the last, where it or the machine has broken this process."""
    try:
        pipe.send(told)
        if not told[-1] and _standard_files() == files:
            return
        pipe.send(False)
    except OSError:  # the call has closed the pipe
        end_started(os.getpid())
        os._exit(1)
    _end()


def _standard_files() -> Any:
    """What standard input, output and error are, None where one is closed: that fails the calls after it."""
    streams = sys.stdin, sys.stdout, sys.stderr
    with suppress(OSError):
        return [(os.fstat(number)[:3], getattr(stream, "closed", None)) for number, stream in enumerate(streams)]


def _told(callee: Callee, number: int, call: Any, began: float, returned: Callable[[], Any]) -> Told:
    try:
        value = callee.result(returned(), call)
        return number, value, "", time.monotonic() - began, False
    except BaseException as error:  # SystemExit included: whatever leaves the function is its failure
        machine = isinstance(error, OSError) and error.errno in OF_THE_MACHINE
        return number, None, callee.failed(error, call), time.monotonic() - began, machine


class _AsyncCalls:
    """Calls under way in a loop in this thread, while another takes new ones in."""

    def __init__(self, callee: Callee, timeout_seconds: float, late: str, say: Callable[[Told], None]) -> None:
        self._callee, self._timeout, self._late, self._say = callee, timeout_seconds, late, say
        self._loop = asyncio.new_event_loop()
        self._running: dict[int, tuple[Any, asyncio.Task]] = {}

    def serve(self, pipe: Connection) -> None:
        """Until the parent is gone."""
        threading.Thread(target=self._receive, args=(pipe,), daemon=True).start()
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # a call's result, which also ends the loop
                self._loop.run_forever()

    def _receive(self, pipe: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._loop.call_soon_threadsafe(self._take, *pipe.recv())
        _end()

    def _take(self, number: int, call: Any) -> None:
        """Begin a call; None: it is late."""
        if call is not None:
            task = self._loop.create_task(_awaited(self._callee, call))
            self._running[number] = call, task
            task.add_done_callback(partial(self._done, number, time.monotonic()))
        elif number in self._running:
            call, task = self._running.pop(number)
            task.cancel()
            self._say((number, None, f"{self._callee.about(call)} {self._late}", self._timeout, False))

    def _done(self, number: int, began: float, task: asyncio.Task) -> None:
        if number in self._running:
            call, _ = self._running.pop(number)
            self._say(_told(self._callee, number, call, began, task.result))


async def _awaited(callee: Callee, call: Any) -> Any:
    return await callee.invoke(call)


def _end_with_parent() -> None:
    """Start a process that ends this worker with its parent: a thread would wait where a call holds the interpreter."""
    worker, parent = os.getpid(), mp.parent_process()
    assert parent is not None
    if os.fork():
        end_with_parent(os.getppid(), 0)  # by which what the worker starts would stay
        return
    end_with_parent(worker)
    parent.join()
    _end()


def _end(*_: object) -> None:
    """End a worker's group and all that it has started, in whatever session, without cleaning up: it may be stuck."""
    end_started(os.getpgrp())
    os.killpg(0, signal.SIGKILL)
