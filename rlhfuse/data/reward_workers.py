"""Processes that call a reward function while generation goes on.

An ordinary function has one call at a time in the main thread of a process; an `async` one has up to ASYNC_AT_ONCE
calls under way in each. Processes, because a function may hold the interpreter, must not slow the engine down, and can
be stopped if it never returns. A call that raises, returns no finite number or takes too long fails everything.
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
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from rlhfuse.base.errors import RewardError
from rlhfuse.data.reward_function import RewardCall, RewardFunction

ASYNC_AT_ONCE = 64
POLL_SECONDS = 0.05
Scores = dict[int, tuple[float, float]]  # sample id -> score, and seconds that its call took


class RewardWorkers:
    """Owns `workers` processes that call the function `name`; what it starts itself ends with them. To be closed.

    `progress` is told of calls that have returned while `finish` waits.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        workers: int,
        timeout_seconds: float,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._name, self._workers, self._timeout = name, workers, timeout_seconds
        self._is_async = RewardFunction.load(name, signature).is_async
        context = mp.get_context("spawn")  # a fork would copy the engine, its threads and its sockets
        self._calls = context.Queue()  # of an async function, which any worker takes from
        self._returned = context.Value("q", 0)  # calls, in all workers
        self._groups = context.SimpleQueue()  # process groups: one of each worker, with all that the function starts
        self._progress = progress
        shared = name, signature, self._calls, self._returned, self._groups
        self._pool = ProcessPool(workers, initializer=_start, initargs=shared, context=context)
        _report_every_end(self._pool)
        self._pending: dict[int, RewardCall] = {}  # by sample id
        self._at_once = 1  # samples of the largest call so far
        self._tasks: dict[ProcessFuture, RewardCall | None] = {}  # under way, with its call if it has one of its own
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of the tasks
        self._scores: dict[int, float] = {}
        self._untold: dict[int, float] = {}  # of them, since `news`
        self._calls_done, self._call_seconds = 0, 0.0  # since `take_calls`
        assert self._pool.active  # to ask starts the processes, which import the function while prompts are prefilled

    def submit(self, calls: Sequence[RewardCall]) -> None:
        """Queue them; returns at once. Raises RewardError when an earlier one is known to have failed."""
        for call in calls:
            self._pending |= dict.fromkeys(call.sample_ids, call)
            self._at_once = max(self._at_once, len(call.sample_ids))
            if self._is_async:
                self._calls.put(call)
            else:
                self._schedule(call, _score, call, timeout=self._timeout)
        self._collect(0.0)

    def finish(self) -> dict[int, float]:
        """Wait for all that was submitted: sample id -> score. Raises RewardError."""
        seen = 0
        while self._pending:
            self._collect(POLL_SECONDS)
            if seen != (seen := self._returned.value):
                self._progress(f"inference: waiting for the reward function, {len(self._pending)} samples left here")
        scores, self._scores, self._untold = self._scores, {}, {}
        return scores

    def news(self) -> dict[int, float]:
        """Sample id -> score of what has returned since the last time; returns at once. Raises RewardError."""
        self._collect(0.0)
        news, self._untold = self._untold, {}
        return news

    def take_calls(self) -> tuple[int, int, float]:
        """Samples scored since the last time, how many a worker has under way at once, and the seconds of them all.

        Each sample of a call takes as long as the call.
        """
        taken = self._calls_done, self._at_once * (ASYNC_AT_ONCE if self._is_async else 1), self._call_seconds
        self._calls_done, self._call_seconds = 0, 0.0
        return taken

    def close(self) -> None:
        """End the processes, and those that the function has started."""
        self._calls.cancel_join_thread()  # nobody reads what is left
        self._pool.stop()
        self._pool.join()
        self._calls.close()
        while not self._groups.empty():
            with suppress(ProcessLookupError):
                os.killpg(self._groups.get(), signal.SIGKILL)

    def _schedule(self, call: RewardCall | None, function: Callable, argument: Any, timeout: float | None) -> None:
        task = self._pool.schedule(function, (argument,), timeout=timeout)
        self._tasks[task] = call
        task.add_done_callback(self._done.put)

    def _collect(self, seconds: float) -> None:
        """Take in what is finished within `seconds`; after that what is finished already."""
        while self._is_async and len(self._tasks) < min(self._workers, len(self._pending)):
            self._schedule(None, _serve, self._timeout, timeout=None)
        with suppress(queue.Empty):
            while True:
                task = self._done.get(timeout=seconds)
                self._take(task, self._tasks.pop(task))
                seconds = 0.0

    def _take(self, task: ProcessFuture, call: RewardCall | None) -> None:
        try:
            scores = task.result()
        except RewardError as error:
            self._fail(str(error))
        except ProcessExpired as error:
            self._fail(f"{self._about(call)} its process ended with exit code {error.exitcode}")
        except concurrent.futures.TimeoutError:
            self._fail(f"{self._about(call)} {_late(self._timeout)}")
        else:
            for sample, (score, seconds) in scores.items():
                self._scores[sample] = self._untold[sample] = score
                self._calls_done, self._call_seconds = self._calls_done + 1, self._call_seconds + seconds
                del self._pending[sample]

    def _about(self, call: RewardCall | None) -> str:
        return (call or self._pending[min(self._pending)]).about(self._name)

    def _fail(self, message: str) -> None:
        self.close()
        raise RewardError(message)


def _report_every_end(pool: ProcessPool) -> None:
    """Let `pool` fail the call of a process that ended with exit code 0, too, which it takes for its own doing."""
    manager = pool._pool_manager.worker_manager
    inspect = manager.inspect_workers

    def inspect_all() -> tuple:
        before = tuple(manager.workers.values())
        ended = inspect()
        return ended + tuple((w.pid, 0) for w in before if w.exitcode == 0 and w.pid not in manager.workers)

    manager.inspect_workers = inspect_all


# in the worker --------------------------------------------------------------------------------------------------

_worker: dict[str, Any] = {}  # what a worker's process has from its start on; empty in every other


def _start(name: str, signature: str, calls: Any, returned: Any, groups: Any) -> None:
    os.setpgid(0, 0)
    groups.put(os.getpid())
    signal.signal(signal.SIGTERM, _end)  # as pebble stops it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    _worker.update(function=RewardFunction.load(name, signature), calls=calls, loop=loop, returned=returned)


def _score(call: RewardCall) -> Scores:
    """Scores of one call. Raises RewardError."""
    loaded: RewardFunction = _worker["function"]
    return _scores(loaded, call, time.monotonic(), lambda: loaded.function(**loaded.arguments(call)))


def _serve(timeout_seconds: float) -> Scores:
    """Await an async function's queued calls, and those that join. Raises RewardError where one fails or is late."""
    loaded: RewardFunction = _worker["function"]
    scores: Scores = {}
    running: dict[concurrent.futures.Future, tuple[RewardCall, float]] = {}  # and when the call began
    while True:
        with suppress(queue.Empty):
            while len(running) < ASYNC_AT_ONCE:
                call = _worker["calls"].get(timeout=0.0 if running or scores else 2 * POLL_SECONDS)
                awaited = asyncio.run_coroutine_threadsafe(_call(loaded, call), _worker["loop"])
                running[awaited] = call, time.monotonic()
        if not running:
            return scores
        done, _ = concurrent.futures.wait(running, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)
        for task in done:
            call, began = running.pop(task)
            scores |= _scores(loaded, call, began, task.result)
        for call, began in running.values():
            if time.monotonic() > began + timeout_seconds:
                raise RewardError(f"{call.about(loaded.name)} {_late(timeout_seconds)}")


async def _call(loaded: RewardFunction, call: RewardCall) -> Any:
    return await loaded.function(**loaded.arguments(call))


def _scores(loaded: RewardFunction, call: RewardCall, began: float, result: Callable[[], Any]) -> Scores:
    try:
        numbers = loaded.numbers(result(), call)
        seconds = time.monotonic() - began
    except RewardError:
        raise
    except BaseException as error:  # SystemExit included: whatever leaves the function is its failure
        raise RewardError(loaded.failed(error, call)) from None
    with _worker["returned"].get_lock():
        _worker["returned"].value += 1
    return {sample: (score, seconds) for sample, score in numbers.items()}


def _late(timeout_seconds: float) -> str:
    return f"no result after {timeout_seconds:g} s (reward.timeout_seconds)"


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
