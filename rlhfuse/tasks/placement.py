"""Which ranks generate together and which score together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class Placement:
    """Global ranks of each generation instance and of each inference worker.

    A worker is as wide as the widest model that scores. It lies in one instance or spans several whole ones, and it is
    free when all its ranks are.
    """

    instances: tuple[tuple[int, ...], ...]
    workers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(models: Sequence[ModelTask]) -> Placement:
        """The placement of a run with these models. Where no model scores, each instance is a worker."""
        generates = next(task for task in models if task.kind == "generate")
        instance, worker = generates.layout.tp, worker_ranks(models) or generates.layout.tp
        return Placement(*(tuple(_cut(generates.mesh, size)) for size in (instance, worker)))

    def instance_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.instances) if rank in ranks)

    def worker_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.workers) if rank in ranks)

    def instances_under(self, worker: int) -> tuple[int, ...]:
        """The instances that have ranks in a worker."""
        return tuple(dict.fromkeys(map(self.instance_of, self.workers[worker])))


def _cut(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Every `size` of the ranks, in order."""
    return [tuple(ranks[first : first + size]) for first in range(0, len(ranks), size)]


def worker_ranks(models: Sequence[ModelTask]) -> int:
    """Ranks of a worker, which holds the widest model that scores; 0 where none does."""
    return max((task.worker for task in models), default=0)


def worker_fault(models: Sequence[ModelTask]) -> str:
    """The equation that fails where models that score cannot share workers, naming one of them; else ''."""
    generates, width = next(task for task in models if task.kind == "generate"), worker_ranks(models)
    for task in (task for task in models if task.kind == "score"):
        if width % task.layout.tp:
            return f"{task.name}: tp({width}) of a worker % tp({task.layout.tp}) = {width % task.layout.tp}, must be 0"
    wide, narrow = max(width, generates.layout.tp), min(width or 1, generates.layout.tp)
    widest = next((task.name for task in models if task.worker == width), "")
    words = f"tp({wide}) % tp({narrow}) = {wide % narrow}, must be 0: a worker spans whole instances or fits into one"
    return f"{widest}: with parallel.generation={generates.layout} {words}" if wide % narrow else ""


def instances_per_worker(models: Sequence[ModelTask]) -> int:
    """Generation instances that a worker spans; 1 also where it lies in one."""
    return max(1, worker_ranks(models) // next(task.layout.tp for task in models if task.kind == "generate"))
