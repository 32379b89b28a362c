"""The watchdog of real processes over a real store, which are terminated, lose the store, and end well.

Ranks that die, raise and hang: tests/fusion/intra/test_failures.py.
"""

import os
import signal
import time

import pytest
from testkit.own_ranks import OwnRanks, StoodClock
from testkit.programs import eventually

from rlhfuse.monitor.heartbeat import Limits

pytestmark = pytest.mark.usefixtures("programs")
WORLD = 3


def work(rank, store, folder, case, interval_seconds):
    """One rank: blocked in C++ in a gloo receive whose sender never sends, unless the case says otherwise."""
    import torch
    import torch.distributed as dist

    from rlhfuse.monitor import watchdog as module
    from rlhfuse.monitor.guard import Guard

    module.time = StoodClock(lambda: all((folder / f"ready{other}").exists() for other in range(WORLD)))
    limits = Limits(interval_seconds=interval_seconds)
    with Guard(rank, 540) as guard, module.Watchdog(store, rank, WORLD, limits, guard) as watchdog:
        watchdog.progress(f"generation step {10 + rank}")
        beats = watchdog._counter
        if interval_seconds < 1:  # the others have this word
            eventually(lambda: watchdog._counter > beats + 1)
        dist.barrier()
        (folder / f"ready{rank}").touch()
        if case == "clean":
            eventually(lambda: rank == 1 or watchdog._counter > beats + 12)
        elif rank < 2:
            dist.recv(torch.zeros(1), src=1 - rank)  # never sent: both wait for each other
        else:
            time.sleep(600)


@pytest.fixture
def job(tmp_path):
    started = []

    def start(case, interval_seconds=0.2):
        started.append(OwnRanks(WORLD, tmp_path, work, case, interval_seconds))
        started[-1].await_files("ready")
        return started[-1]

    yield start
    for one in started:
        one.__exit__()


def test_sigterm_ends_a_blocked_rank_with_143(job):
    running = job("blocked")
    for process in running.ranks:
        process.terminate()
    assert running.exit_codes() == [143, 143, 143]
    texts = running.texts
    assert "terminated" in texts[0] and "this is rank 0, which was in: generation step 10" in texts[0]
    assert not any("died" in text for text in texts)


def test_sigterm_after_a_death_names_the_dead(job):
    """What torchrun does: a rank dies, then the others get SIGTERM; heartbeats are too slow to have noticed."""
    running = job("blocked", interval_seconds=60)
    os.kill(running.ranks[2].pid, signal.SIGKILL)
    running.ranks[2].join()
    for process in running.ranks[:2]:
        process.terminate()
    assert running.exit_codes(0, 1) == [1, 1]
    assert all("died; last seen in: " in text for text in running.texts[:2])


def test_lost_store_ends_the_job(job):
    running = job("blocked")
    running.store = None  # the launcher's store goes with its last reference
    assert running.exit_codes() == [1, 1, 1]
    assert any("launcher has died" in text for text in running.texts)


def test_clean_end_is_quiet(job):
    running = job("clean")
    assert running.exit_codes() == [0, 0, 0]
    assert not any("watchdog:" in text for text in running.texts)
