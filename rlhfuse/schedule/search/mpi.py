"""What the ranks of a search tell each other between two rounds (paper: section 6, MPI).

A round costs two reductions: the least (makespan found, share of the budget used, minus its stop signal) and the sum of
the moves. Only a makespan worth having is followed by the least peak memory at it, the lowest rank that has both, and
that rank's sequence. All ranks decide alike from equal numbers. Waiting polls, so that signals are noticed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.search.solution import Round

FIRST_NAP_SECONDS = 0.0002
LONGEST_NAP_SECONDS = 0.001


def load_mpi() -> Any:
    """The module mpi4py.MPI, which initialises MPI. Raises InputError when mpi4py or an MPI library is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(f"started under mpirun but MPI cannot be loaded ({error}); pip install rlhfuse[mpi]") from None
    return MPI


@contextmanager
def in_turn(comm: Any) -> Iterator[None]:
    """The body runs on rank 0 of `comm`, then on the first rank of every host, then on all others.

    numba writes the index of a kernel before the kernel itself: processes that fill one cache together may read what
    an older version has left there. `comm` None stands for one process.
    """
    if comm is None:
        yield
        return
    host = comm.Split_type(load_mpi().COMM_TYPE_SHARED)
    turn = 0 if comm.Get_rank() == 0 else 1 if host.Get_rank() == 0 else 2
    for _ in range(turn):
        meet(comm)
    try:
        yield
    finally:
        for _ in range(2 - turn):
            meet(comm)
        host.Free()


def meet(comm: Any) -> None:
    """Returns once every rank of `comm` is here; whoever comes early waits without taking a core."""
    _wait([comm.Ibarrier()])


def _wait(requests: Sequence[Any], idle: Callable[[], None] = lambda: None) -> None:
    nap = FIRST_NAP_SECONDS
    while not all([request.Test() for request in requests]):
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)
        idle()


class RoundResult(NamedTuple):
    """What all ranks know after it: the best sequence, the least share, the largest signal, the sums."""

    sequence: np.ndarray | None
    share: float
    signal: int
    tried: int
    accepted: int


class Exchange:
    """The ranks of one search for sequences of `size` operations; `comm` is an mpi4py communicator or None.

    `idle` is called while a rank that is slow, or dead, keeps this one waiting.
    """

    def __init__(self, size: int, comm: Any = None, idle: Callable[[], None] = lambda: None) -> None:
        self.size, self.comm, self.idle = size, comm, idle
        self.rank = comm.Get_rank() if comm is not None else 0
        self.min = load_mpi().MIN if comm is not None else None

    def agree(
        self, done: Round, share: float, signal: int, beats: Callable[[tuple[float, float]], bool]
    ) -> RoundResult:
        """Exchange a round; `share` of this rank's budget is used, `signal` asks for the end (0: none does).

        A sequence is passed on only if `beats` its (makespan, peak memory): a pure function, equal on all ranks.
        """
        own, key = None, (math.inf, math.inf)
        if done.solution is not None:
            own, key = done.solution.sequence, done.solution[:2]
        if self.comm is None:
            return RoundResult(own if beats(key) else None, share, signal, done.tried, done.accepted)
        mine = np.array([key[0], share, -signal])
        counts = np.array([done.tried, done.accepted], np.int64)
        (makespan, share, stop), (tried, accepted) = self._reduce((mine, self.min), (counts, None))
        sequence = None
        if beats((makespan, -math.inf)):  # no rank can do better than this
            peak = self._minimum(key[1] if key[0] == makespan else math.inf)
            if beats((makespan, peak)):
                winner = int(self._minimum(self.rank if key == (makespan, peak) else math.inf))
                sequence = self._broadcast(own, winner)
        return RoundResult(sequence, float(share), int(-stop), int(tried), int(accepted))

    def _minimum(self, value: float) -> float:
        ((least,),) = self._reduce((np.array([value], np.float64), self.min))
        return float(least)

    def _reduce(self, *parts: tuple[np.ndarray, Any]) -> list[np.ndarray]:
        """The reduction of each array over all ranks, by its operation (None: the sum); posted together."""
        results = [np.empty_like(array) for array, _ in parts]
        requests = [
            self.comm.Iallreduce(array, result, **({} if operation is None else {"op": operation}))
            for (array, operation), result in zip(parts, results)
        ]
        _wait(requests, self.idle)
        return results

    def _broadcast(self, sequence: np.ndarray | None, winner: int) -> np.ndarray:
        buffer = np.empty(self.size, np.int64)
        if self.rank == winner and sequence is not None:
            buffer[:] = sequence
        _wait([self.comm.Ibcast(buffer, root=winner)], self.idle)
        return buffer
