"""The watchdog: its decisions on made-up heartbeats, then real processes that die, hang and are terminated."""

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time

import pytest
from testkit.workers import forkserver, host_store, join

from rlhfuse.monitor.heartbeat import (
    FAILED,
    INTERRUPTED,
    LEFT,
    TERMINATED,
    Heartbeat,
    Limits,
    PeerTable,
    ProcessName,
    Waiting,
    process_status,
)
from rlhfuse.monitor.watchdog import PEERS_PER_TICK, Watchdog

HERE = ProcessName.own()
FAR = ProcessName("far", "far", 7, "1")
LIMITS = Limits(watchdog_seconds=15, hang_seconds=100)


def beat(rank, process=FAR, counter=0, progress=0, doing="generation step 3", **fields):
    return Heartbeat(rank, process, counter, progress, doing, **fields)


def table():
    return PeerTable(beat(0, HERE), LIMITS, now=0.0)


def test_heartbeat_reads_back():
    original = beat(3, HERE, 5, 6, state=FAILED, because="ValueError: x")
    assert Heartbeat.from_json(original.to_json().encode()) == original


def test_own_process_lives_and_an_ended_one_is_gone():
    assert not HERE.is_gone(HERE.machine)
    assert dataclasses.replace(HERE, started="1").is_gone(HERE.machine)  # the pid was used again
    assert not dataclasses.replace(HERE, pid=2**22 - 1).is_gone("another machine")
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        name = dataclasses.replace(HERE, pid=child.pid, started=process_status(child.pid)[1])
        assert not name.is_gone(HERE.machine)
    finally:
        child.kill()
        child.join()
    assert name.is_gone(HERE.machine)


def test_silent_peer_is_dead_and_a_beating_one_is_not():
    peers = table()
    for now in range(0, 40):
        peers.note(beat(1, counter=now), now)
        peers.note(beat(2, counter=min(now, 10)), now)
        verdict = peers.verdict(now)
        if now <= 25:
            assert verdict is None
    seen = "last seen in: generation step 3 (its word of 29.0 s before)"
    assert f"rank 2 (pid 7 on far) died: silent for 29 s; {seen}" in verdict.report
    assert verdict.exit_code == 1


def test_the_cause_is_named_before_its_consequences():
    """Rank 1 left because rank 2 died: rank 1's end must not be reported as the cause."""
    peers = table()
    peers.note(beat(1, dataclasses.replace(HERE, started="1")), 0)  # gone without a word
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
    ended = dataclasses.replace(HERE, started="1")
    store = ScriptedStore(beat(1, HERE), beat(1, ended), beat(1, ended, state=LEFT, because="rank 2 died"))
    watchdog = Watchdog(store, rank=0, world_size=2, limits=LIMITS)
    watchdog._table = PeerTable(beat(0, HERE), Limits(watchdog_seconds=-1), now=0.0)
    assert watchdog._look(1, 0).report == "rank 2 died (found by rank 1)"


@pytest.mark.parametrize(
    "state, exit_code, words",
    [(FAILED, 1, "failed with ValueError: x"), (INTERRUPTED, 130, "interrupted"), (TERMINATED, 143, "terminated")],
)
def test_what_peers_say_on_leaving(state, exit_code, words):
    peers = table()
    peers.note(beat(1, state=state, because="ValueError: x"), 0)
    assert peers.verdict(0).exit_code == exit_code and words in peers.verdict(0).report


def test_a_rank_that_ended_cleanly_is_not_dead():
    peers = table()
    peers.note(beat(1, state="done", process=dataclasses.replace(HERE, started="1")), 0)
    assert peers.verdict(90) is None


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
    peers.note(idle.now_in("training"), 103)
    assert peers.verdict(103) is None


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
    """2000 ranks: a round of readings takes 125 s, longer than watchdog_seconds; the store's load stays linear."""
    store = CountingStore()
    monkeypatch.setattr("rlhfuse.monitor.watchdog.time", store)
    watchdog = Watchdog(store, rank=0, world_size=2000, limits=Limits())
    for tick in range(400):
        store.now = float(tick)
        assert watchdog._look(PEERS_PER_TICK, tick) is None
    assert store.reads == 400 * PEERS_PER_TICK
    store.dead_since[1234] = store.now
    for tick in range(400, 650):  # two rounds
        store.now = float(tick)
        if verdict := watchdog._look(PEERS_PER_TICK, tick):
            break
    assert verdict and "rank 1234 (pid 7 on far) died: silent for 1" in verdict.report


@pytest.mark.parametrize("suspended", [True, False])
def test_a_rank_that_was_suspended_does_not_judge_by_what_it_missed(monkeypatch, suspended):
    """As `scontrol suspend` and `resume`: the other rank slept as well, and wakes two seconds later; or it is dead."""
    store, left, naps = CountingStore(), [], [1.0] * 5 + [9.0 if suspended else 1.0] + [1.0] * 20
    store.set = lambda key, text: None
    monkeypatch.setattr("rlhfuse.monitor.watchdog.time", store)
    watchdog = Watchdog(store, 0, 2, Limits(watchdog_seconds=6, hang_seconds=8), left.append)

    def sleep(_):
        store.now += naps.pop(0)
        store.dead_since = {1: 5.0} if 5 < store.now < 16 or not suspended else {}
        if len(naps) == 1:
            watchdog._stopping.set()
        return b""

    watchdog._signals = sleep
    watchdog._run()
    assert bool(left) == (not suspended)


class DictStore(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def test_sigterm_is_heard_through_a_descriptor_of_1024_or_more():
    """As in a job of a thousand ranks, whose sockets have the numbers before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    files, left, ended = [], [], threading.Event()
    try:
        files += [open(os.devnull) for _ in range(1100)]
        exit_process = lambda code: (left.append(code), ended.set())  # noqa: E731
        with Watchdog(DictStore(), 0, 1, Limits(interval_seconds=600), exit_process) as watchdog:
            assert watchdog._wake_read.fileno() >= 1024
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(60) and left == [143]
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def alone(left, ended):
    """The watchdog of a job of one rank, which says with which code it would have left."""
    return Watchdog(DictStore(), 0, 1, Limits(interval_seconds=600), lambda code: (left.append(code), ended.set()))


def test_ctrl_c_lets_the_iteration_end_and_a_second_one_does_not(monkeypatch, capfd):
    monkeypatch.setattr("rlhfuse.monitor.watchdog.SAME_SIGNAL_SECONDS", 0.0)
    left, ended = [], threading.Event()
    with alone(left, ended) as watchdog:
        watchdog.finishing = "iteration 3 of 9 is finished first"
        watchdog.go_on = "go on with: program --again"
        os.kill(os.getpid(), signal.SIGINT)
        while not watchdog.stop_asked:
            time.sleep(0.01)
        said = capfd.readouterr().err
        assert said == "stopping: iteration 3 of 9 is finished first; Ctrl-C once more ends it now\n" and not left
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(60) and left == [130]
        watchdog._stopping.set()  # it has left
    said = capfd.readouterr().err
    assert "interrupted before the end of: iteration 3 of 9" in said and said.endswith(
        "; go on with: program --again\n"
    )


def test_ctrl_c_with_nothing_to_finish_interrupts():
    left, ended = [], threading.Event()
    with pytest.raises(KeyboardInterrupt, match="interrupted in: start; start the same command again"):
        with alone(left, ended) as watchdog:
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(60)
    assert watchdog._table.heartbeats == [] and not left


def test_usr1_asks_for_an_end_and_the_launchers_patience_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "6")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    left, ended = [], threading.Event()
    dog = Watchdog(DictStore(), 0, 1, Limits(interval_seconds=0.2), lambda code: (left.append(code), ended.set()))
    with dog as watchdog:
        watchdog.finishing, watchdog.go_on = "iteration 3 of 9", "go on with: program --again"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended.wait(60) and left[0] == 130 and watchdog.stop_asked
        watchdog._stopping.set()
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told.startswith("not done in time, 1 s, before the launcher ends it: iteration 3 of 9; this is rank 0")
    assert told.endswith("; go on with: program --again")


def test_a_checkpoint_that_is_written_is_waited_for_at_the_end():
    left, ended, saved = [], threading.Event(), threading.Event()
    with alone(left, ended) as watchdog:
        watchdog.is_saving = lambda: not saved.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ended.wait(1)
        saved.set()
        assert ended.wait(60) and left == [143]
        watchdog._stopping.set()


def test_hang_needs_every_rank_to_stand_still():
    peers = table()
    for now in range(0, 300, 10):
        peers.note(beat(1, counter=now, progress=min(now, 150)), now)
        verdict = peers.verdict(now)
        assert (verdict is None) == (now <= 250)
    assert "no rank made progress" in verdict.report and "is in: generation step 3" in peers.places()
    peers.note_own(beat(0, HERE, progress=1), 300)
    peers.note(beat(1, counter=300, progress=150), 300)
    assert peers.verdict(300) is None


def test_unheard_since_counts_only_running_ranks():
    peers = table()
    peers.note(beat(1), 0)
    peers.note(beat(2, HERE), 0)
    peers.note(beat(3, state=TERMINATED), 0)
    peers.note(beat(4, counter=1), 5)
    assert [b.rank for b in peers.unheard_since(2)] == [1, 2]
    assert [b.rank for b in peers.elsewhere(peers.unheard_since(2))] == [1]


def test_the_lowest_rank_left_reports_the_places():
    peers = PeerTable(beat(3, HERE), LIMITS, now=0.0)
    peers.note(beat(0, dataclasses.replace(HERE, started="1"), doing="step 0"), 0)  # gone
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
    watchdog = Watchdog(store, rank=0, world_size=2, limits=LIMITS, exit_process=lambda code: None)
    watchdog._table = PeerTable(beat(0, HERE), LIMITS, now=0.0)
    watchdog._leave_by_error("RuntimeError: Connection closed by peer")
    return store.said


def test_an_error_because_of_a_peer_that_is_still_dying_is_not_the_own_one(capfd):
    said = failing(beat(1, HERE), beat(1, HERE), beat(1, dataclasses.replace(HERE, started="1"), doing="training 7"))
    assert said.state == LEFT and "died; last seen in: training 7 (its word of " in said.because
    assert "rank 1" in capfd.readouterr().err


def test_an_error_counts_as_own_once_every_peer_has_shown_life():
    said = failing(beat(1, HERE), beat(1, HERE), beat(1, HERE, counter=1))
    assert said.state == FAILED and said.because == "RuntimeError: Connection closed by peer"


def test_an_error_beside_a_silent_peer_names_it(monkeypatch):
    monkeypatch.setattr("rlhfuse.monitor.watchdog.GRACE_SECONDS", 0.3)
    said = failing(beat(1, FAR))
    assert said.state == FAILED
    assert "closed by peer; not heard since: rank 1 (pid 7 on far), last seen in" in said.because


# ---- real processes over a real store


def work(rank, world, port, folder, case, limits):
    """One rank: blocked in C++ in a gloo receive whose sender never sends, unless the case says otherwise."""
    sys.stderr.flush()
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist

    from rlhfuse.monitor.watchdog import Watchdog

    torch.set_num_threads(1)
    join(port, rank, world)
    store = dist.TCPStore("127.0.0.1", port)
    with Watchdog(store, rank, world, limits) as watchdog:
        watchdog.progress(f"generation step {10 + rank}")
        dist.barrier()
        open(f"{folder}/ready{rank}", "w").close()
        if case == "clean" and rank == 1:
            return
        if case == "fails" and rank == 2:
            time.sleep(0.5)
            raise ValueError("reward is NaN")
        if case == "clean":
            time.sleep(2)
        elif rank < 2:
            dist.recv(torch.zeros(1), src=1 - rank)  # never sent: both wait for each other
        else:
            time.sleep(600)


class Job:
    """Ranks as spawned processes, and the store that a launcher would host."""

    def __init__(self, folder, case, world=3, limits=Limits(interval_seconds=0.2)):
        self.store = host_store()
        self.folder = folder
        context = forkserver()
        arguments = (world, self.store.port, str(folder), case, limits)
        self.ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world)]
        for process in self.ranks:
            process.start()

    def wait_ready(self):
        deadline = time.monotonic() + 540
        while not all((self.folder / f"ready{rank}").exists() for rank in range(len(self.ranks))):
            assert time.monotonic() < deadline, [self.stderr(rank) for rank in range(len(self.ranks))]
            time.sleep(0.05)
        time.sleep(0.5)  # into the receive

    def stderr(self, rank):
        file = self.folder / f"stderr{rank}"
        return file.read_text() if file.exists() else ""

    def exit_codes(self, ranks, seconds=540):
        for rank in ranks:
            self.ranks[rank].join(seconds)
        return [self.ranks[rank].exitcode for rank in ranks]

    def close(self):
        for process in self.ranks:
            process.kill()
            process.join()


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(case, **kwargs):
        jobs.append(Job(tmp_path, case, **kwargs))
        jobs[-1].wait_ready()
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


def test_killed_rank_is_named_by_ranks_blocked_in_gloo(job):
    running = job("blocked")
    os.kill(running.ranks[2].pid, signal.SIGKILL)
    assert running.exit_codes([0, 1]) == [1, 1]
    for rank in (0, 1):
        text = running.stderr(rank)
        assert f"rank 2 (pid {running.ranks[2].pid} on {socket.gethostname()}) died" in text
        assert "last seen in: generation step 12" in text
        assert f"this is rank {rank}, which was in: generation step {10 + rank}" in text
    assert ") was in: generation step 11" in running.stderr(0) and "the other ranks" not in running.stderr(1)


def test_rank_that_raises_is_named_with_its_error(job):
    running = job("fails")
    assert running.exit_codes([0, 1, 2]) == [1, 1, 1]
    assert "rank 2" in running.stderr(0) and "failed with ValueError: reward is NaN" in running.stderr(0)
    assert "ValueError: reward is NaN" in running.stderr(2) and "watchdog:" not in running.stderr(2)


def test_stopped_rank_is_silent_and_found(job):
    """SIGSTOP stands in for a host that vanished: the pid is there, the heartbeat is not."""
    running = job("blocked", limits=Limits(watchdog_seconds=8, interval_seconds=0.2))
    os.kill(running.ranks[2].pid, signal.SIGSTOP)
    assert running.exit_codes([0, 1]) == [1, 1]
    assert "is stopped, by a signal or a debugger: silent for" in running.stderr(0)


def test_sigterm_ends_a_blocked_rank_with_143(job):
    running = job("blocked")
    for process in running.ranks:
        process.terminate()
    assert running.exit_codes([0, 1, 2]) == [143, 143, 143]
    assert "terminated" in running.stderr(0) and "this is rank 0, which was in: generation step 10" in running.stderr(0)
    assert not any("died" in running.stderr(rank) for rank in range(3))


def test_sigterm_after_a_death_names_the_dead(job):
    """What torchrun does: a rank dies, then the others get SIGTERM; heartbeats are too slow to have noticed."""
    running = job("blocked", limits=Limits(interval_seconds=60))
    os.kill(running.ranks[2].pid, signal.SIGKILL)
    running.ranks[2].join()
    for process in running.ranks[:2]:
        process.terminate()
    assert running.exit_codes([0, 1]) == [1, 1]
    assert all("died; last seen in: " in running.stderr(rank) for rank in (0, 1))


def test_hang_prints_where_every_rank_is(job):
    running = job("blocked", limits=Limits(hang_seconds=8, interval_seconds=0.2))
    assert running.exit_codes([0, 1, 2]) == [1, 1, 1]
    assert all("no rank made progress for" in running.stderr(rank) for rank in range(3))
    for rank in range(3):
        assert f"this is rank {rank}, which was in: generation step {10 + rank}" in running.stderr(rank)
    text = running.stderr(0)
    assert all(f"was in: generation step {10 + other}" in text for other in (1, 2)), text
    assert sum("the other ranks:" in running.stderr(rank) for rank in range(3)) == 1


def test_lost_store_ends_the_job(job):
    running = job("blocked")
    running.store = None  # the launcher's store goes with its last reference
    assert running.exit_codes([0, 1, 2]) == [1, 1, 1]
    assert any("launcher has died" in running.stderr(rank) for rank in range(3))


def test_clean_end_is_quiet(job):
    running = job("clean")
    assert running.exit_codes([0, 1, 2]) == [0, 0, 0]
    assert not any("watchdog:" in running.stderr(rank) for rank in range(3))
