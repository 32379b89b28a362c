"""Worker processes on gloo for distributed tests: started once per file, given one function after another.

`Workers(n)` forks n processes into one process group. `run(function, *arguments)` calls `function(rank, *arguments)`
on every rank and returns the results in rank order; a failure on any rank is raised with its traceback and closes
the pool, because the group is then unusable. A call that takes too long kills all workers. `Pools` starts a pool anew
for each file of tests, from one process that has loaded all modules: gloo's threads outlive their groups, a hundred of
them a file, and turn without work.

The store is this process's: its port is bound when it is chosen, so that no other process can take it meanwhile.
"""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def forkserver() -> Any:
    """The context of a process that loads torch, Megatron and a run's modules once; every rank is forked from it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.multiprocessing", "rlhfuse.run.launch", "rlhfuse.monitor.loggers"])
    return context


def host_store() -> dist.TCPStore:
    """A store on a free port, for `join`; it lives as long as the value."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(port: int, rank: int, world: int) -> None:
    """Make the gloo group of all ranks, over the store at `port`."""
    store = dist.PrefixStore("gloo", dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _serve(rank: int, world: int, port: int, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from rlhfuse.base.errors import leave
    from rlhfuse.parallel.device import allow_many_files

    torch.set_num_threads(1)
    allow_many_files()
    join(port, rank, world)
    while (path := pipe.recv()) is not None:
        sys.path[:] = path  # of this file of tests, whose functions are imported here
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        gc.collect()  # models and their groups form cycles, and every group holds sockets
    dist.destroy_process_group()
    leave(0)


class Workers:
    """A pool of ranks."""

    def __init__(self, world: int, timeout_seconds: float = 540.0) -> None:  # a hang: a busy machine needs minutes
        from rlhfuse.parallel.device import allow_many_files

        allow_many_files()  # tensors that come back through a pipe are open files here
        context = forkserver()
        self._timeout, self.alive = timeout_seconds, True
        self._store = host_store()
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self._store.port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(sys.path)
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(results) < len(self._pipes):  # in any order: while one failed, others may wait for it
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                ranks = ", ".join(map(str, waiting.values()))
                raise TimeoutError(f"no answer within {self._timeout} s from ranks {ranks}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    good, value = pipe.recv()
                except EOFError:
                    self.kill()
                    raise RuntimeError(f"rank {rank} ended without an answer") from None
                if not good:
                    self.kill()
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        self.alive = False
        for process in self._processes:
            process.kill()
            process.join(10)

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                pass
        for process in self._processes:
            process.join(10)
        self.kill()


class Pools:
    """A pool of ranks of each size, for the tests of a file."""

    def __init__(self) -> None:
        self._pools: dict[int, Workers] = {}

    def of(self, world: int) -> Workers:
        """The pool of that size; a new one where it was killed."""
        if world not in self._pools or not self._pools[world].alive:
            self._pools[world] = Workers(world)
        return self._pools[world]

    def close(self) -> None:
        """End all ranks: the next file has new ones."""
        while self._pools:
            self._pools.popitem()[1].close()
