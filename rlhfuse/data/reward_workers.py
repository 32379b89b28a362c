"""Processes that call a reward function while generation goes on.

    submit ──> queue ──> worker 0: function(sample)  ──> pipe ──> finish
                    └──> worker 1: function(sample)  ──> pipe ──┘

Each worker takes the next sample when it has room: one at a time for an ordinary function, which runs in the main
thread of its process, up to ASYNC_AT_ONCE at a time for an `async` one. Processes, because a function may hold the
interpreter, must not slow the engine down, and can be stopped if it never returns. A function that raises, returns
no finite number or takes too long fails everything: RewardError names it and the sample.

Workers end with their parent, however that ends. Knows nothing of tokens, ranks or files.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rlhfuse.data.reward_function import RewardCall, RewardFunction, about_sample
from rlhfuse.errors import RewardError

ASYNC_AT_ONCE = 64
STARTED, SCORED, FAILED = "started", "scored", "failed"


class RewardWorkers:
    """Owns `workers` processes that call the function `name`; to be closed."""

    def __init__(self, name: str, signature: str, workers: int, timeout_seconds: float) -> None:
        """The function must have been loaded once, so that it is known to be there; the processes start in its own."""
        context = mp.get_context("spawn")  # a fork would copy the engine, its threads and its sockets
        self._name, self._timeout = name, timeout_seconds
        self._calls = context.Queue()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._pending: dict[int, RewardCall] = {}
        self._began: dict[int, tuple[float, int]] = {}  # sample -> (monotonic seconds, worker) of its call
        self._scores: dict[int, float] = {}
        for number in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(name, signature, self._calls, theirs), name=f"reward-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def submit(self, calls: Sequence[RewardCall]) -> None:
        """Queue the samples; returns at once. Raises RewardError when an earlier one is known to have failed."""
        for call in calls:
            self._pending[call.sample_id] = call
            self._calls.put(call)
        self._collect(0.0)

    def finish(self) -> dict[int, float]:
        """Wait for all that was submitted: sample id -> score. Raises RewardError."""
        while self._pending:
            self._collect(self._patience())
        scores, self._scores = self._scores, {}
        return scores

    def close(self) -> None:
        """End the processes."""
        self._calls.cancel_join_thread()  # nobody reads what is left
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._calls.close()

    def _patience(self) -> float:
        """Seconds until the oldest running call is too late."""
        if not self._began:
            return self._timeout
        oldest = min(began for began, _ in self._began.values())
        return max(oldest + self._timeout - time.monotonic(), 0.0)

    def _collect(self, seconds: float) -> None:
        """Take in what workers say within `seconds`; after that what is there already."""
        while ready := wait(self._pipes, seconds):
            seconds = 0.0
            for pipe in ready:
                try:
                    self._take(self._pipes.index(pipe), *pipe.recv())
                except EOFError:
                    self._lost(self._pipes.index(pipe))
        late = [sample for sample, (began, _) in self._began.items() if time.monotonic() - began > self._timeout]
        if late:
            about = about_sample(self._name, self._pending[min(late)])
            self._fail(f"{about} no result after {self._timeout:g} s (reward.timeout_seconds)")

    def _take(self, worker: int, kind: str, sample: int, said: Any) -> None:
        if kind == STARTED:
            self._began[sample] = (said, worker)
            return
        if kind == FAILED:
            self._fail(said)
        self._began.pop(sample)
        self._pending.pop(sample)
        self._scores[sample] = said

    def _lost(self, worker: int) -> None:
        self._processes[worker].join(1.0)
        code = self._processes[worker].exitcode
        held = sorted(sample for sample, (_, by) in self._began.items() if by == worker)
        about = about_sample(self._name, self._pending[held[0]]) if held else f"reward function {self._name}:"
        self._fail(f"{about} its process ended with exit code {code}")

    def _fail(self, message: str) -> None:
        self.close()
        raise RewardError(message)


# in the worker --------------------------------------------------------------------------------------------------


def _serve(name: str, signature: str, calls: Any, results: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loaded = RewardFunction.load(name, signature)
    if loaded.is_async:
        asyncio.run(_serve_async(loaded, calls, results))
        return
    while True:
        call: RewardCall = calls.get()
        results.send((STARTED, call.sample_id, time.monotonic()))
        try:
            said = (SCORED, call.sample_id, loaded.number(loaded.function(**loaded.arguments(call)), call))
        except BaseException as error:
            said = _failure(loaded, error, call)
        results.send(said)


async def _serve_async(loaded: RewardFunction, calls: Any, results: Connection) -> None:
    room = asyncio.Semaphore(ASYNC_AT_ONCE)
    running: set[asyncio.Task] = set()  # the loop itself keeps only weak references

    async def score(call: RewardCall) -> None:
        results.send((STARTED, call.sample_id, time.monotonic()))
        try:
            returned = await loaded.function(**loaded.arguments(call))
            said = (SCORED, call.sample_id, loaded.number(returned, call))
        except BaseException as error:
            said = _failure(loaded, error, call)
        results.send(said)
        room.release()

    while True:
        await room.acquire()
        call = await asyncio.to_thread(calls.get)
        task = asyncio.create_task(score(call))
        running.add(task)
        task.add_done_callback(running.discard)


def _failure(loaded: RewardFunction, error: BaseException, call: RewardCall) -> tuple[str, int, str]:
    """SystemExit included: whatever leaves the function is the function's failure."""
    text = str(error) if isinstance(error, RewardError) else loaded.failed(error, call)
    return FAILED, call.sample_id, text


def _end_with_parent() -> None:
    mp.parent_process().join()
    os._exit(1)  # without cleaning up: the main thread may never come back
