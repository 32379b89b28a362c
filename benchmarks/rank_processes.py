"""The processes of a benchmark of several ranks, which keep their models and are told over a pipe what to run.

Between two requests they wait in a read and take no CPU. This file does without torch, so that the benchmark itself
starts at once and stays small.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Mapping
from typing import Any

from rich.console import Console

RANKS = 2
TIMEOUT_SECONDS = 300.0
CPU_LIMIT = 0.97  # below this the ranks were not alone

PLENTY = str(1 << 30)
ALLOCATOR = {  # glibc gives memory back to the system and faults it in again in every step unless told to keep it
    "MALLOC_MMAP_THRESHOLD_": PLENTY,
    "MALLOC_TRIM_THRESHOLD_": PLENTY,
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def warn_of_company(screen: Console, share: float) -> None:
    """Say so when the ranks got no more than a `share` of the processor time that their work took."""
    if share < CPU_LIMIT:
        screen.print(f"the ranks got {share:.0%} of the processor: they were not alone, do not trust these figures")


class Ranks:
    """The processes of all ranks; `ask` calls a method of the worker's class on each and returns their answers.

    `worker` is "module:Class". The module's `begin(rank)` joins the ranks; "build" makes an object of the class from
    the rank and the arguments given, and drops the one before.
    """

    def __init__(self, worker: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # inherited, and read by the allocator when a process starts
        context = multiprocessing.get_context("spawn")
        self._port = socket.socket()  # kept open, so that nobody else is given the port before rank 0 listens on it
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(worker, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()  # or its end would not be seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._port.close()

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Raises RuntimeError with a rank's traceback, or when one does not answer."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        answers: list[Any] = [None] * RANKS
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_SECONDS):
                raise RuntimeError(f"rank {rank} did not answer {method!r} within {TIMEOUT_SECONDS:g} s")
            try:
                good, answers[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended in {method!r}") from None
            if not good:
                raise RuntimeError(f"rank {rank} failed in {method!r}:\n{answers[rank]}")
        return answers


def serve(worker: str, rank: int, port: int, pipe: Any) -> None:
    """The program of a rank: "build" makes its models, anything else is a method of them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    name, _, made = worker.partition(":")
    module = importlib.import_module(name)  # here: torch is loaded in the ranks alone
    module.begin(rank)
    models: Any = None
    while True:
        method, arguments = pipe.recv()
        try:
            if method == "build":
                if models is not None:
                    models.close()
                models = None
                gc.collect()
                models = getattr(module, made)(rank, *arguments)
                answer = None
            else:
                answer = getattr(models, method)(*arguments)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
