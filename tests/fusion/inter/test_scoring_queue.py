"""Which worker takes what the long tail publishes; two workers in one process."""

import threading

import pytest
import torch
import torch.distributed as dist
from testkit.programs import eventually

from rlhfuse.fusion.inter.iteration_store import IterationStore
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.report import RankEvents
from rlhfuse.fusion.inter.scoring_queue import ScoringQueue
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.placement import Placement

PLACEMENT = Placement(((0,), (1,)), ((0,), (1,)))


class Scorer:
    """Takes no time."""

    load_seconds = waited_seconds = 0.0
    loads = False

    def begin_load(self) -> None:
        self.loads = True

    def wait_for_first(self) -> None: ...

    def score(self, pack, worker):
        return list(pack)

    def release(self) -> None: ...


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return IterationStore(server, 1, timeout_seconds=540)


def queue(store, rank: int) -> ScoringQueue:
    place = RankPlace(rank, PLACEMENT, None, None)
    return ScoringQueue(store.reconnect(), place, Scorer(), 64, RankEvents(), lambda _: None)


def sample(number: int) -> Rollout:
    return Rollout(number, (1, 2), (3, 4), torch.zeros(2), "stop")


def test_what_is_published_last_goes_to_a_worker_that_has_its_models(store):
    """A destination that publishes its last sample and looks for work at once would load all models for it."""
    freed, destination, scored = queue(store, 0), queue(store, 1), []
    thread = threading.Thread(target=lambda: scored.extend(freed.pull([sample(0)], 1, 2)))
    thread.start()
    eventually(lambda: store.add_ready(0) == 1)
    store.publish([sample(1).to_bytes()])
    assert destination.pull([sample(0)], 1, 2) == []
    thread.join(120)
    assert [one.sample_id for one in scored] == [0, 1]
    assert freed.scorer.loads and not destination.scorer.loads and store.add_workers(0) == 2
