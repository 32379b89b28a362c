"""Loads every numba kernel of a search, compiling those that are not in the cache: seconds, once.

numba writes the index of a kernel before the kernel itself, so that processes which fill one cache
together may read what an older version has left there. `in_turn` lets them do it one after the other.

Knows nothing of the problem at hand. The communicator is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhfuse.kernel_cache import compile_apart
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.objective import Goal, Incumbent
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.schedule.search.paper_chain import PaperChain
from rlhfuse.schedule.search.steady_state import order_by_aim
from rlhfuse.schedule.search.worker import Chain

NAP_SECONDS = 0.001


def load_kernels(method: str) -> None:
    """Make a few moves on a tiny problem, with all that a chain of `method` may call."""
    times = ((1, 1), (2, 2), (1, 1))
    actor = Pipeline("actor", "actor", (0, 1), 8, *times)
    problem = FusionProblem(2, (actor, Pipeline("critic", "critic", (1, 0), 8, *times)))
    goal, graph, start = Goal(problem, "memory"), build_graph(problem), Incumbent.of(greedy(problem))
    if method == "paper":
        PaperChain(graph, goal, [start], 1, 0).round(start, 1, 0.0)
        return
    chain = Chain(graph, goal, [start], 1, 0)
    for _ in range(2):  # the first may bring nothing but a start
        chain.round(start, 1, 0.0)
    for number, stretcher in enumerate(chain.stretchers):
        stretcher.best(chain.levels[number].best, chain.levels[number + 1].better)


def compile_kernels_apart() -> None:
    """Those of the default search in another process, unless they are cached; the stretching is the last it calls."""
    compile_apart(order_by_aim, "rlhfuse.schedule.search.kernels")


@contextmanager
def in_turn(comm: Any, host: Any) -> Iterator[None]:
    """The body runs on rank 0 of `comm`, then on the first rank of every host, then on all others.

    `host` is the communicator of the ranks that share this one's memory, and is freed; both None for one process.
    """
    if comm is None:
        yield
        return
    first, leader = comm.Get_rank() == 0, host.Get_rank() == 0
    before = 0 if first else 1 if leader else 2
    for _ in range(before):
        _meet(comm)
    try:
        yield
    finally:
        for _ in range(2 - before):
            _meet(comm)
        host.Free()


def _meet(comm: Any) -> None:
    """Wait for all ranks by asking, so that signals are noticed."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_SECONDS)


if __name__ == "__main__":
    load_kernels("default")
