"""How often all ranks of a run meet."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

OPERATIONS = ("all_gather_object", "gather_object", "broadcast_object_list", "all_reduce", "all_gather", "barrier")
AT_THRESHOLD = SAMPLES = ["all_gather_object"]
BOOKS = ["gather_object", "broadcast_object_list"]


@contextmanager
def meetings() -> Iterator[list[list[str]]]:
    """Collectives of all ranks, not of a group that a task has, since the start of each iteration."""
    from rlhfuse.run.trainer import Trainer

    found: list[list[str]] = []

    def recorded(name, run):
        def collective(*args, group=None, **more):
            if found and group is None:
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
    """At the samples and at the books; instances of generation meet once more, at R_t."""
    settings = "fusion.threshold=8 trainer.iterations=3 trainer.export=false"
    for iterations in runs.start("meetings", settings, watch=meetings):
        assert iterations[:-1] == [AT_THRESHOLD + SAMPLES + BOOKS] * 2
