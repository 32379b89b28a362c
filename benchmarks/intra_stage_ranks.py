"""The processes of the intra-stage benchmark, and what they answer.

Processes keep their models from case to case, and are told over a pipe what to run; between two requests they wait
in a read and take no CPU. This file does without torch, so that the benchmark itself starts at once and stays small.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

from intra_stage_cases import RANKS

TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Action:
    """A computing action of one rank, in seconds of its clock."""

    rank: int
    text: str  # actor:0F1
    key: tuple[str, int, str]  # model, stage, kind
    start: float
    end: float


@dataclass(frozen=True)
class Spent:
    """Where a rank's executor spent the time of instructions of one kind, in seconds."""

    count: int
    transport: float  # in the calls that start sends and receives
    waiting: float  # for inputs and reductions
    overhead: float  # in the executor itself


@dataclass(frozen=True)
class Run:
    """What one rank did in one run of a side; of Megatron's own loop only the times of the whole are known."""

    start: float
    end: float
    cpu_seconds: float  # of the thread that computes
    page_faults: int
    actions: tuple[Action, ...] = ()
    spent: tuple[tuple[str, Spent], ...] = ()  # by kind of instruction; a kind may come once for each phase
    drain_seconds: float = 0.0  # waited at the end until the last sends were received
    peak_live: int = 0  # most micro-batches kept for their backward

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def busy_seconds(self) -> float:
        return sum(action.end - action.start for action in self.actions)


@dataclass(frozen=True)
class Round:
    """One run of a side over all ranks; the actions' times count from its start."""

    seconds: float
    actions: tuple[Action, ...]
    runs: tuple[Run, ...]  # by rank

    @staticmethod
    def of(runs: Sequence[Run]) -> "Round":
        start = min(run.start for run in runs)
        actions = tuple(
            replace(action, start=action.start - start, end=action.end - start)
            for run in runs
            for action in run.actions
        )
        return Round(max(run.end for run in runs) - start, actions, tuple(runs))


class Ranks:
    """The processes of all ranks; `ask` calls a method of TrainingRank on each and returns their answers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # inherited, and read by the allocator when a process starts
        context = multiprocessing.get_context("spawn")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()  # or its end would not be seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()

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


def serve(rank: int, port: int, pipe: Any) -> None:
    """The program of a rank: "build" makes its models, anything else is a method of them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from intra_stage_worker import TrainingRank, begin  # here: torch is loaded in the ranks alone

    begin(rank)
    models: Any = None
    while True:
        method, arguments = pipe.recv()
        try:
            if method == "build":
                if models is not None:
                    models.close()
                models = None
                gc.collect()
                models = TrainingRank(rank, *arguments)
                answer = None
            else:
                answer = getattr(models, method)(*arguments)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
