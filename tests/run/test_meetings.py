"""How often all ranks of a run meet."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

OPERATIONS = ("all_gather_object", "gather_object", "broadcast_object_list", "all_reduce", "all_gather", "barrier")
SAMPLES, BOOKS = ["all_gather_object"], ["gather_object", "broadcast_object_list"]


@contextmanager
def meetings() -> Iterator[list[list[str]]]:
    """Collectives of all ranks since the start of each iteration."""
    from rlhfuse.run.trainer import Trainer

    found: list[list[str]] = []

    def recorded(name, run):
        def collective(*args, group=None, **more):
            if found and group in (None, dist.group.WORLD):
                found[-1].append(name)
            return run(*args, group=group, **more)

        return collective

    def iterate(trainer, number, run=Trainer.iterate):
        found.append([])
        return run(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "iterate", iterate)
        for name in OPERATIONS:
            patch.setattr(dist, name, recorded(name, getattr(dist, name)))
        yield found


def test_all_ranks_meet_twice_in_an_iteration(runs):
    settings = "fusion.inter_stage=false trainer.iterations=3"
    for iterations in runs.start("meetings", settings, watch=meetings):
        assert iterations[:-1] == [SAMPLES + BOOKS] * 2
    for iterations in runs.start("meetings, fused", "fusion.threshold=8 trainer.iterations=3", watch=meetings):
        assert iterations[:-1] == [SAMPLES + SAMPLES + BOOKS] * 2  # once more at R_t
