"""Processes that make calls of a user's code while generation goes on.

An ordinary function has one call at a time in the main thread of a process; an `async` one has up to ASYNC_AT_ONCE
calls under way in each. Processes, because a function may hold the interpreter, must not slow the engine down, and can
be stopped if it never returns. What became of a call is its `Outcome`: none that fails or is late fails another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing as mp
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from rlhfuse.base.launcher import SAFE_PATH

ASYNC_AT_ONCE = 64
POLL_SECONDS = 0.05
WATCH_SECONDS = 0.01  # between two looks at async calls
Told = tuple[int, tuple[Any, str, float]]  # a call's number; its value, what failed, and its seconds


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
    """What became of a call. `error`: why there is no value."""

    call: Any
    value: Any
    error: str
    seconds: float


class CallPool:
    """Owns `workers` processes that have loaded `load(*arguments)`; what these start ends with them. To be closed.

    `setting` is the name of `timeout_seconds`, for messages.
    """

    def __init__(
        self, load: Callable[..., Callee], arguments: Sequence[Any], workers: int, timeout_seconds: float, setting: str
    ) -> None:
        self._callee, self._workers, self._timeout = load(*arguments), workers, timeout_seconds
        self._is_async = self._callee.is_async  # asked for each call and each time that outcomes are
        self._late = f"no result after {timeout_seconds:g} s ({setting})"
        context = mp.get_context("spawn")  # a fork would copy the engine, its threads and its sockets
        self._groups = context.SimpleQueue()  # process groups: one of each worker, with all that it starts
        shared = load, arguments, timeout_seconds, self._late, self._groups
        self._pool = ProcessPool(workers, initializer=_start, initargs=shared, context=context)
        self._ended: dict[int, int] = {}  # process -> its exit code
        _note_every_end(self._pool, self._ended)
        self._calls: dict[int, Any] = {}  # by number, of which the outcome is not known
        self._submitted = 0
        self._waiting: list[int] = []  # async ones that no process has
        self._held: dict[int, int] = {}  # async ones -> the process that has them
        self._tasks: dict[ProcessFuture, Sequence[int]] = {}  # under way, with the calls that they bring
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of the tasks
        assert self._pool.active  # to ask starts the processes, which load while prompts are prefilled

    @property
    def at_once(self) -> int:
        """Calls that a process has under way at once."""
        return ASYNC_AT_ONCE if self._is_async else 1

    def submit(self, calls: Sequence[Any]) -> None:
        """Begin them; returns at once."""
        for call in calls:
            number, self._submitted = self._submitted, self._submitted + 1
            self._calls[number] = call
            if self._is_async:
                self._waiting.append(number)
            else:
                self._schedule([number], _make, number, call, timeout=self._timeout)
        self._attend()

    def outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        """What calls came to since the last time; waits so long where there may be none yet."""
        self._attend()
        told = self._ends()
        with suppress(queue.Empty):
            while True:
                task = self._done.get(timeout=seconds)
                told += self._read(task, self._tasks.pop(task))
                seconds = 0.0
        self._attend()
        return [Outcome(self._calls.pop(number), *rest) for number, rest in told if number in self._calls]

    def close(self) -> None:
        """End the processes, and those that the user's code has started."""
        self._pool.stop()
        self._pool.join()
        while not self._groups.empty():
            with suppress(ProcessLookupError):
                os.killpg(self._groups.get(), signal.SIGKILL)

    def _schedule(self, numbers: Sequence[int], function: Callable, *arguments: Any, timeout: float | None) -> None:
        task = self._pool.schedule(function, arguments, timeout=timeout)
        self._tasks[task] = numbers
        task.add_done_callback(self._done.put)

    def _attend(self) -> None:
        """Have every process bring what its async calls came to, and give it its part of new ones."""
        while self._is_async and self._calls and len(self._tasks) < self._workers:
            part = -(-len(self._waiting) // (self._workers - len(self._tasks)))
            numbers, self._waiting = self._waiting[:part], self._waiting[part:]
            self._schedule(numbers, _bring, [(number, self._calls[number]) for number in numbers], timeout=None)

    def _read(self, task: ProcessFuture, numbers: Sequence[int]) -> list[Told]:
        try:
            process, told = task.result()
        except ProcessExpired as error:
            return [self._expired(number, error.exitcode) for number in numbers]
        except concurrent.futures.TimeoutError:
            return [(n, (None, f"{self._callee.about(self._calls[n])} {self._late}", self._timeout)) for n in numbers]
        for number in numbers:
            self._held[number] = process
        for number, _ in told:
            self._held.pop(number, None)
        return told

    def _ends(self) -> list[Told]:
        """Ends of async calls whose process is no more."""
        lost = [number for number, process in self._held.items() if process in self._ended]
        return [self._expired(number, self._ended[self._held.pop(number)]) for number in lost]

    def _expired(self, number: int, code: int) -> Told:
        about = self._callee.about(self._calls[number])
        return number, (None, f"{about} its process ended with exit code {code}", 0.0)


def _note_every_end(pool: ProcessPool, ended: dict[int, int]) -> None:
    """Let `pool` fail the call of a process that ended with exit code 0, too, which it takes for its own doing; and
    note every end."""
    manager = pool._pool_manager.worker_manager
    inspect = manager.inspect_workers

    def inspect_all() -> tuple:
        before = tuple(manager.workers.values())
        found = inspect()
        found += tuple((w.pid, 0) for w in before if w.exitcode == 0 and w.pid not in manager.workers)
        ended.update(found)
        return found

    manager.inspect_workers = inspect_all


# in the worker --------------------------------------------------------------------------------------------------

_worker: dict[str, Any] = {}  # what a worker's process has from its start on; empty in every other


def _start(load: Callable[..., Callee], arguments: Sequence[Any], timeout: float, late: str, groups: Any) -> None:
    os.environ.pop(SAFE_PATH, None)  # what the user's code starts is as ever
    os.setpgid(0, 0)
    groups.put(os.getpid())
    signal.signal(signal.SIGTERM, _end)  # as pebble stops it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a batch system's notice to all processes: an iteration ends first
    threading.Thread(target=_end_with_parent, daemon=True).start()
    callee = load(*arguments)
    _worker.update(callee=callee)
    if callee.is_async:
        _worker.update(calls=_AsyncCalls(callee, timeout, late))


def _make(number: int, call: Any) -> tuple[int, list[Told]]:
    """Make one call, in this thread."""
    callee: Callee = _worker["callee"]
    return os.getpid(), [_told(callee, number, call, time.monotonic(), lambda: callee.invoke(call))]


def _bring(calls: Sequence[tuple[int, Any]]) -> tuple[int, list[Told]]:
    """Begin async calls, and bring what others have come to since the last time."""
    begun: _AsyncCalls = _worker["calls"]
    for call in calls:
        begun.new.put(call)
    told: list[Told] = []
    with suppress(queue.Empty):
        while True:
            told.append(begun.told.get(timeout=0.0 if told else POLL_SECONDS))
    return os.getpid(), told


def _told(callee: Callee, number: int, call: Any, began: float, returned: Callable[[], Any]) -> Told:
    try:
        value = callee.result(returned(), call)
        return number, (value, "", time.monotonic() - began)
    except BaseException as error:  # SystemExit included: whatever leaves the function is its failure
        return number, (None, callee.failed(error, call), time.monotonic() - began)


class _AsyncCalls:
    """Calls under way in a loop in a thread of its own, while another begins, watches and ends them."""

    def __init__(self, callee: Callee, timeout_seconds: float, late: str) -> None:
        self._callee, self._timeout, self._late = callee, timeout_seconds, late
        self.new: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._running: dict[concurrent.futures.Future, tuple[int, Any, float]] = {}  # and when the call began
        self._loop = _loop_of_its_own()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        running = self._running
        while True:
            with suppress(queue.Empty):
                while len(running) < ASYNC_AT_ONCE:
                    number, call = self.new.get(timeout=0.0 if running else None)
                    awaited = asyncio.run_coroutine_threadsafe(_awaited(self._callee, call), self._loop)
                    running[awaited] = number, call, time.monotonic()
            done, _ = concurrent.futures.wait(running, WATCH_SECONDS, concurrent.futures.FIRST_COMPLETED)
            for task in done:
                number, call, began = running.pop(task)
                self.told.put(_told(self._callee, number, call, began, task.result))
            late = [task for task, (*_, began) in running.items() if time.monotonic() > began + self._timeout]
            self._end(late, self._late, self._timeout)
            if late and not _answers(self._loop):
                self._end([*running], "a call beside it, that does not await, held up its process", 0.0)
                self._loop = _loop_of_its_own()

    def _end(self, tasks: Sequence[concurrent.futures.Future], why: str, seconds: float) -> None:
        for task in tasks:
            number, call, _ = self._running.pop(task)
            task.cancel()
            self.told.put((number, (None, f"{self._callee.about(call)} {why}", seconds)))


async def _awaited(callee: Callee, call: Any) -> Any:
    return await callee.invoke(call)


def _loop_of_its_own() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    with suppress(concurrent.futures.TimeoutError):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=1.0)
        return True
    return False


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    _end()


def _end(*_: object) -> None:
    """End this process and all that it has started, in whatever session, without cleaning up: it may be stuck."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    started = [os.getpid()]
    for process in started:
        started += [child for child, parent in parents.items() if parent == process]
    for pid in started[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
