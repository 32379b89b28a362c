"""The watchdog's decisions on made-up heartbeats, and what a process of its own does at signals."""

import dataclasses
import os
import signal
from unittest.mock import Mock

import pytest
from testkit.programs import eventually

from rlhfuse.monitor.guard import Guard
from rlhfuse.monitor.heartbeat import (
    FAILED,
    INTERRUPTED,
    LEFT,
    STUCK_SECONDS,
    TERMINATED,
    Heartbeat,
    Limits,
    PeerTable,
    ProcessName,
    Waiting,
    WaitingForWork,
    WaitingOutside,
    process_status,
)
from rlhfuse.monitor.watchdog import PEERS_PER_TICK, Watchdog

HERE = ProcessName.own()
FAR = ProcessName("far", "far", 7, "1")
GONE = dataclasses.replace(HERE, started="1")  # whose pid was used again
LIMITS = Limits(watchdog_seconds=15, hang_seconds=100)


def beat(rank, process=FAR, counter=0, progress=0, doing="generation step 3", **fields):
    return Heartbeat(rank, process, counter, progress, doing, **fields)


def table():
    return PeerTable(beat(0, HERE), LIMITS, now=0.0, world_size=3)


@pytest.fixture
def child():
    """Another process, which waits for ever: its name, and a function that sends it a signal."""
    pid = os.fork()
    while not pid:
        signal.pause()
    name = dataclasses.replace(HERE, pid=pid, started=process_status(pid)[1])
    yield name, lambda number: os.kill(pid, number)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_own_process_lives_and_an_ended_one_is_gone(child):
    assert not HERE.is_gone(HERE.machine)
    assert GONE.is_gone(HERE.machine)
    assert not dataclasses.replace(HERE, pid=2**22 - 1).is_gone("another machine")
    name, send = child
    assert not name.is_gone(HERE.machine)
    send(signal.SIGKILL)  # who is not waited for yet has ended, too
    eventually(lambda: name.is_gone(HERE.machine))
    assert dataclasses.replace(HERE, pid=2**22 + 1).is_gone(HERE.machine)  # there can be no such process


def test_a_stopped_process_is_silent_though_it_is_there(child):
    name, send = child
    send(signal.SIGSTOP)
    eventually(lambda: process_status(name.pid)[0] in "Tt")
    peers = table()
    for now in (0, 15):
        peers.note(beat(1, name), now)
        assert peers.verdict(now) is None
    peers.note(beat(1, name), 16)
    assert "is stopped, by a signal or a debugger: silent for 16 s" in peers.verdict(16).report


def test_silent_peer_is_dead_and_a_beating_one_is_not():
    peers = table()
    for now in range(0, 40):
        peers.note(beat(1, counter=now), now)
        peers.note(beat(2, counter=min(now, 10)), now)
        verdict = peers.verdict(now)
        assert verdict is None or now > 25
    seen = "last seen in: generation step 3 (its word of 29.0 s before)"
    assert f"rank 2 (pid 7 on far) died: silent for 29 s; {seen}" in verdict.report
    assert verdict.exit_code == 1


def test_the_cause_is_named_before_its_consequences():
    """Rank 1 left because rank 2 died: rank 1's end must not be reported as the cause."""
    peers = table()
    peers.note(beat(1, GONE), 0)  # without a word
    peers.note(beat(3, state=LEFT, because="rank 2 (pid 9 on far) died"), 0)
    assert peers.verdict(0).report == "rank 2 (pid 9 on far) died (found by rank 3)"


class ScriptedStore:
    """Gives the beats of one peer one after another, the last for ever."""

    def __init__(self, *beats):
        self.beats = list(beats)

    def check(self, keys):
        return True

    def get(self, key):
        return (self.beats.pop(0) if len(self.beats) > 1 else self.beats[0]).to_json().encode()


def test_a_peer_that_leaves_while_it_is_read_is_not_the_cause():
    """Rank 1 wrote why it leaves, and ended, after it was read for the second time."""
    store = ScriptedStore(beat(1, HERE), beat(1, GONE), beat(1, GONE, state=LEFT, because="rank 2 died"))
    watchdog = Watchdog(store, rank=0, world_size=2, limits=LIMITS, guard=Guard(0, 540))
    watchdog._table = PeerTable(beat(0, HERE), Limits(watchdog_seconds=-1), now=0.0, world_size=2)
    assert watchdog._look(1).report == "rank 2 died (found by rank 1)"


@pytest.mark.parametrize(
    "state, exit_code, words",
    [
        (FAILED, 1, "failed with ValueError: x"),
        (INTERRUPTED, 130, "interrupted"),
        (TERMINATED, 143, "terminated"),
        ("done", None, None),
    ],
)
def test_what_peers_say_on_leaving(state, exit_code, words):
    peers = table()
    peers.note(beat(1, GONE, state=state, because="ValueError: x"), 0)
    found = peers.verdict(90)
    assert found is None if words is None else found.exit_code == exit_code and words in found.report


def test_waiting_is_no_progress_and_who_does_not_wait_is_named():
    """Rank 1 is stuck, rank 2 idles in a loop that says so again and again, this rank is in a barrier."""
    peers, idle = table(), beat(2)
    peers.note_own(beat(0, HERE).now_in(Waiting("barrier")), 0)
    for now in range(0, 102):
        idle = idle.now_in(Waiting("nothing left to decode"))
        peers.note(dataclasses.replace(beat(1, progress=7), counter=now), now)
        peers.note(dataclasses.replace(idle, counter=now), now)
        verdict = peers.verdict(now)
        assert (verdict is None) == (now <= 100)
    assert verdict.report == "no rank made progress for 101 s; rank 1 (pid 7 on far) is in: generation step 3"
    peers.note(beat(1, counter=102, progress=7).now_in(Waiting("gather")), 102)
    assert peers.verdict(102).report.endswith("; all wait for each other")
    peers.note(beat(1, counter=102, progress=7).now_in(WaitingOutside("tool f of sample 3")), 102)
    assert peers.verdict(102).report.endswith("; rank 1 (pid 7 on far) is in: tool f of sample 3")
    peers.note(idle.now_in("training"), 103)
    assert peers.verdict(103) is None
    for still in (beat(1, progress=7), idle.now_in("training")):
        peers.note(dataclasses.replace(still, counter=300), 300)
    assert "no rank made progress for 197 s" in peers.verdict(300).report
    peers.note_own(beat(0, HERE, progress=1), 300)
    assert peers.verdict(300) is None


LOOKS, MEETS = WaitingForWork("inference: waiting for work"), Waiting("barrier")
QUIET = {0: LOOKS, 1: LOOKS, 2: MEETS}  # rank -> what it does; the last has met nobody yet


@pytest.mark.parametrize(
    "doing, fields, stuck",
    [
        ({}, {}, True),
        ({2: LOOKS}, {}, True),
        ({0: MEETS, 1: MEETS}, {}, False),  # all in one collective, which may move much
        ({1: WaitingOutside("tool f of sample 3")}, {}, False),
        ({1: "generation step 3"}, {}, False),
        ({0: "generation step 3"}, {}, False),
        ({}, {"calls": 1}, False),
        ({}, {"state": "done"}, False),
        ({2: None}, {}, False),  # not heard of
    ],
)
def test_a_job_is_stuck_where_all_wait_and_nothing_is_under_way(doing, fields, stuck):
    peers, now = table(), 0.0
    ranks = {rank: beat(rank, FAR if rank else HERE).now_in(what) for rank, what in (QUIET | doing).items() if what}
    ranks[1] = dataclasses.replace(ranks[1], **fields)

    def pass_second(who=(0, 1, 2)):
        nonlocal now
        now += 1
        for rank in ranks.keys() & {*who}:
            ranks[rank] = dataclasses.replace(ranks[rank], counter=int(now))
        for rank in ranks.keys() - {0}:
            peers.note(ranks[rank], now)
        peers.note_own(ranks[0], now)
        return peers.verdict(now)

    begun = 1  # the first is when they are seen to wait
    assert not any([pass_second() for _ in range(begun + int(STUCK_SECONDS))])
    assert bool(verdict := pass_second()) == stuck
    if stuck:
        assert "stuck" in verdict.report and verdict.exit_code == 1
        ranks[2] = dataclasses.replace(ranks[2], progress=1)  # it has worked meanwhile, and waits again
        assert not any([pass_second() for _ in range(begun + int(STUCK_SECONDS))])
        peers.woke(now)  # or this process has not run
        assert not any([pass_second() for _ in range(int(STUCK_SECONDS))])
        assert not any([pass_second(who=(0, 2)) for _ in range(5)])  # as if rank 1 did not run
        assert pass_second() and "stuck" in peers.verdict(now).report


def test_ranks_that_are_read_seldom_are_stuck_once_their_waits_are_known_to_overlap():
    peers = table()
    for now in (0, 30, 60):
        peers.note_own(beat(0, HERE).now_in(LOOKS), now)
        peers.note(beat(1, counter=now).now_in(MEETS), now)
        assert peers.verdict(now) is None
    peers.note(beat(2, counter=60).now_in(LOOKS), 60)  # its first word
    assert peers.verdict(60) is None
    for rank, now in ((1, 75), (2, 85)):
        peers.note(beat(rank, counter=now).now_in(LOOKS), now)
        assert peers.verdict(now) is None
    peers.note(beat(1, counter=85).now_in(LOOKS), 85)
    assert peers.verdict(85).report.endswith("is under way") and "25 s" in peers.verdict(85).report


class CountingStore:
    """Every rank lives and works: a key's counter is the time."""

    def __init__(self):
        self.now, self.reads, self.dead_since = 0.0, 0, {}

    def monotonic(self):
        return self.now

    def check(self, keys):
        return True

    def get(self, key):
        self.reads += 1
        rank = int(key.partition("/")[2])
        counter = int(min(self.now, self.dead_since.get(rank, self.now)))
        return beat(rank, counter=counter, progress=counter).to_json().encode()


def test_a_large_world_reads_no_more_peers_per_heartbeat(monkeypatch):
    """640 ranks: a round of readings takes 40 s, longer than the 15 s of silence; the store's load stays linear."""
    store = CountingStore()
    monkeypatch.setattr("rlhfuse.monitor.watchdog.time", store)
    watchdog = Watchdog(store, rank=0, world_size=640, limits=LIMITS, guard=Guard(0, 540))
    for tick in range(100):
        store.now, watchdog._counter = float(tick), tick
        assert watchdog._look(PEERS_PER_TICK) is None
    assert store.reads == 100 * PEERS_PER_TICK
    store.dead_since[123] = store.now
    for tick in range(100, 182):  # two rounds
        store.now, watchdog._counter = float(tick), tick
        if verdict := watchdog._look(PEERS_PER_TICK):
            break
    assert verdict and "rank 123 (pid 7 on far) died: silent for " in verdict.report


@pytest.mark.parametrize("suspended", [True, False])
def test_a_rank_that_was_suspended_does_not_judge_by_what_it_missed(monkeypatch, suspended):
    """As `scontrol suspend` and `resume`: the other rank slept as well, and wakes two seconds later; or it is dead."""
    store, left, naps = CountingStore(), [], [1.0] * 5 + [9.0 if suspended else 1.0] + [1.0] * 20
    store.set = lambda key, text: None
    monkeypatch.setattr("rlhfuse.monitor.watchdog.time", store)
    guard = Guard(0, 540, exit_process=left.append)
    watchdog = Watchdog(store, 0, 2, Limits(watchdog_seconds=6, hang_seconds=8), guard)

    def sleep(_):
        store.now += naps.pop(0)
        store.dead_since = {1: 5.0} if 5 < store.now < 16 or not suspended else {}
        if len(naps) == 1:
            watchdog._stopping.set()

    watchdog._due.wait = sleep
    watchdog._run()
    assert bool(left) == (not suspended)


def test_unheard_since_counts_only_running_ranks():
    peers = table()
    for known in (beat(1), beat(2, HERE), beat(3, state=TERMINATED)):
        peers.note(known, 0)
    peers.note(beat(4, counter=1), 5)
    assert [b.rank for b in peers.unheard_since(2)] == [1, 2]
    assert [b.rank for b in peers.elsewhere(peers.unheard_since(2))] == [1]


def test_the_lowest_rank_left_reports_the_places():
    peers = PeerTable(beat(3, HERE), LIMITS, now=0.0, world_size=3)
    peers.note(beat(0, GONE, doing="step 0"), 0)
    peers.note(beat(1, state=FAILED, doing="step 1"), 0)
    assert peers.reporter() == 3
    peers.note(beat(2, doing="step 2"), 0)
    assert peers.reporter() == 2 and [b.rank for b in peers.still_to_report()] == [2]
    peers.note(beat(2, doing="step 2"), 20)
    assert peers.reporter() == 3  # silent too long
    peers.note(beat(2, state=LEFT, doing="step 2b"), 20)
    assert peers.reporter() == 2 and not peers.still_to_report()
    places = peers.places().splitlines()
    assert [line.split(") ")[1] for line in places] == ["was last seen in: step 0", "was in: step 1", "was in: step 2b"]


def test_places_are_bounded_in_a_large_world():
    peers = table()
    for rank in range(1, 256):
        peers.note(beat(rank), 0)
    lines = peers.places().splitlines()
    assert len(lines) == 65 and lines[-1] == "  and 191 more ranks"


class SlowDeathStore(ScriptedStore):
    """Rank 1's sockets are closed, so the main thread has failed; its process is gone a few readings later."""

    def set(self, key, text):
        self.said = Heartbeat.from_json(text)


def failing(*beats):
    store = SlowDeathStore(*beats)
    watchdog = Watchdog(store, 0, 2, LIMITS, Guard(0, 540, exit_process=lambda code: None))
    watchdog._table = PeerTable(beat(0, HERE), LIMITS, now=0.0, world_size=3)
    watchdog._leave_by_error("RuntimeError: Connection closed by peer")
    return store.said


def test_an_error_because_of_a_peer_that_is_still_dying_is_not_the_own_one(capfd):
    said = failing(beat(1, HERE), beat(1, HERE), beat(1, GONE, doing="training 7"))
    assert said.state == LEFT and "died; last seen in: training 7 (its word of " in said.because
    assert "rank 1" in capfd.readouterr().err


def test_an_error_counts_as_own_once_every_peer_has_shown_life():
    said = failing(beat(1, HERE), beat(1, HERE), beat(1, HERE, counter=1))
    assert said.state == FAILED and said.because == "RuntimeError: Connection closed by peer"


def test_an_error_beside_a_silent_peer_names_it(monkeypatch):
    monkeypatch.setattr("rlhfuse.monitor.watchdog.GRACE_SECONDS", 0.3)  # in which nobody is heard
    said = failing(beat(1, FAR))
    assert said.state == FAILED
    assert "closed by peer; not heard since: rank 1 (pid 7 on far), last seen in" in said.because


def test_a_cut_network_is_the_cause_though_its_connection_is_closed_afterwards(monkeypatch, capfd):
    """The thread's question timed out while the main thread left by an error; every later one says "Broken pipe"."""
    errors = [OSError("Connection timed out"), *[OSError("Broken pipe")] * 9]
    monkeypatch.setattr(SlowDeathStore, "check", Mock(side_effect=errors))
    watchdog = Watchdog(SlowDeathStore(), 0, 2, LIMITS, Guard(0, 540, exit_process=Mock()))
    pytest.raises(OSError, watchdog._look, 1)
    watchdog._leave_by_error("RuntimeError: Connection timed out")
    assert "is cut off" in capfd.readouterr().err
