"""What the ranks of a search tell each other between two rounds.

A round costs two reductions of a few numbers, posted together and finished in log(ranks) hops: the
least of every rank's (makespan found, share of the budget used, minus its stop signal), and the sum of
its moves. Only when that makespan is worth having do the ranks also agree on the least peak memory at
it, then on the lowest rank that has both, and only that rank's sequence travels, as plain integers.
All ranks read the same numbers, so all take the same decision.

Waiting is done by asking, not inside MPI: signals are noticed, and `idle` is called, while a rank that
is slow, or dead, keeps the others waiting.

Knows nothing of schedules; the communicator is handed in. Paper: section 6, MPI.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

FIRST_NAP_SECONDS = 0.0002
LONGEST_NAP_SECONDS = 0.001


class Say(NamedTuple):
    """What one rank brings to the end of a round. `key` is (makespan, peak memory), infinite without a find."""

    key: tuple[float, float] = (math.inf, math.inf)
    sequence: np.ndarray | None = None
    share: float = 0.0  # of its budget used, 1 when it is spent
    signal: int = 0  # a signal that asks for the end; 0 for none
    tried: int = 0
    accepted: int = 0


class Heard(NamedTuple):
    """What all ranks know after it: the best find, the least share, the largest signal, the sums."""

    sequence: np.ndarray | None
    share: float
    signal: int
    tried: int
    accepted: int


class Exchange:
    """The ranks of one search for sequences of `size` operations.

    `comm` is an mpi4py communicator and `least` its MIN; both None for one process.
    """

    def __init__(self, size: int, comm: Any = None, least: Any = None, idle: Callable[[], None] = lambda: None) -> None:
        self.size, self.comm, self.least, self.idle = size, comm, least, idle
        self.rank, self.ranks = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)

    def agree(self, say: Say, beats: Callable[[tuple[float, float]], bool]) -> Heard:
        """Exchange one round. A find is passed on only if `beats` its key: a pure function, the same on every rank."""
        if self.comm is None:
            return Heard(say.sequence if beats(say.key) else None, *say[2:])
        mine = np.array([say.key[0], say.share, -say.signal])
        counts = np.array([say.tried, say.accepted], np.int64)
        (makespan, share, signal), (tried, accepted) = self._reduce((mine, self.least), (counts, None))
        sequence = None
        if beats((makespan, -math.inf)):  # no rank can do better than this
            peak = self._minimum(say.key[1] if say.key[0] == makespan else math.inf)
            if beats((makespan, peak)):
                winner = int(self._minimum(self.rank if say.key == (makespan, peak) else math.inf))
                sequence = self._spread(say.sequence, winner)
        return Heard(sequence, float(share), int(-signal), int(tried), int(accepted))

    def _minimum(self, value: float) -> float:
        ((least,),) = self._reduce((np.array([value], np.float64), self.least))
        return float(least)

    def _reduce(self, *parts: tuple[np.ndarray, Any]) -> list[np.ndarray]:
        """The reduction of each array over all ranks, by its operation (None: the sum)."""
        results = [np.empty_like(array) for array, _ in parts]
        self._wait(
            [
                self.comm.Iallreduce(array, result, **({} if operation is None else {"op": operation}))
                for (array, operation), result in zip(parts, results)
            ]
        )
        return results

    def _spread(self, sequence: np.ndarray | None, winner: int) -> np.ndarray:
        """The winner's sequence on every rank."""
        buffer = np.empty(self.size, np.int64)
        if self.rank == winner:
            buffer[:] = sequence
        self._wait([self.comm.Ibcast(buffer, root=winner)])
        return buffer

    def _wait(self, requests: Sequence[Any]) -> None:
        nap = FIRST_NAP_SECONDS
        while not all([request.Test() for request in requests]):
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_SECONDS)
            self.idle()
