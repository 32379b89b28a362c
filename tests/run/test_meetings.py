"""How often all ranks of a run meet."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

OPERATIONS = ("all_gather_object", "gather_object", "broadcast_object_list", "all_reduce", "all_gather", "barrier")
AT_THRESHOLD = SAMPLES = ["all_gather_object"]
BOOKS = ["gather_object", "broadcast_object_list"]


@contextmanager
def meetings() -> Iterator[tuple[list[list[str]], list[str]]]:
    """By iteration, collectives on no group of a task; and the places that the watchdog was given."""
    from rlhfuse.monitor.watchdog import Watchdog
    from rlhfuse.run.trainer import Trainer

    found: list[list[str]] = []
    places: list[str] = []

    def recorded(name, run):
        def collective(*args, group=None, **more):
            if found and group is None:
                found[-1].append(name)
            return run(*args, group=group, **more)

        return collective

    def iterate(trainer, number, run=Trainer.iterate):
        found.append([])
        return run(trainer, number)

    def progress(watchdog, doing, run=Watchdog.progress):
        places.append(str(doing))
        return run(watchdog, doing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "iterate", iterate)
        patch.setattr(Watchdog, "progress", progress)
        for name in OPERATIONS:
            patch.setattr(dist, name, recorded(name, getattr(dist, name)))
        yield found, places


def test_all_ranks_meet_twice_in_an_iteration(runs):
    """At the samples and at the books; instances of generation meet once more, at R_t."""
    settings = "fusion.threshold=8 trainer.iterations=3 trainer.export=false"
    for iterations, places in runs.start("meetings", settings, watch=meetings):
        assert iterations[:-1] == [AT_THRESHOLD + SAMPLES + BOOKS] * 2
        assert [place for place in places if "books" in place] == [f"iteration {i}: books" for i in range(3)]
