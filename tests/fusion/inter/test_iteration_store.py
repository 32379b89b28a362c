"""What ranks share through the store, and the thread that reports to it; in one process."""

import threading
import time

import pytest
import torch.distributed as dist

from rlhfuse.fusion.inter.iteration_store import IterationStore, StoreReporter


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return IterationStore(dist.PrefixStore("job", server), 3, timeout_seconds=540)


def test_what_never_comes_is_named(store):
    store._timeout = 0.2
    with pytest.raises(TimeoutError, match="sample 0 of the long tail was announced but not sent in 0 s"):
        store.fetch(0)


def test_a_reporter_does_not_keep_its_owner_waiting(store, monkeypatch):
    """The store answers only when the owner is through with all its reports."""
    own, answers, waited = IterationStore.add_finished, threading.Event(), []
    monkeypatch.setattr(
        IterationStore, "add_finished", lambda *given: (waited.append(answers.wait(120)), own(*given))[1]
    )
    with StoreReporter(store) as reporter:
        for _ in range(100):
            reporter.report(1)
            assert reporter.finished == 0
        answers.set()
    assert store.add_finished(0) == 100 and all(waited)


def test_a_reporter_that_fails_raises_where_it_is_asked(store, monkeypatch):
    def broken(*_):
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(IterationStore, "add_finished", broken)
    with pytest.raises(ConnectionError, match="the store is gone"), StoreReporter(store) as reporter:
        while reporter.finished == 0:
            time.sleep(0.001)
