"""Which ranks generate together and which score together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Global ranks of each generation instance and of each inference worker (a replica inside one instance)."""

    instances: tuple[tuple[int, ...], ...]
    workers: tuple[tuple[int, ...], ...]

    def instance_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.instances) if rank in ranks)

    def worker_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.workers) if rank in ranks)
