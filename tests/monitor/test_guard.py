"""What a rank does at signals, when its time is over, and where the job's store does not answer.

A rank in this process: its two threads are those of a run, only the end of the process is a note.
"""

import json
import math
import os
import resource
import signal
import socket
import threading
from types import SimpleNamespace

import pytest
from testkit.programs import eventually

from rlhfuse.monitor.guard import Guard
from rlhfuse.monitor.heartbeat import Limits, process_seconds
from rlhfuse.monitor.watchdog import Watchdog, _unreachable

LIMITS = Limits(interval_seconds=600)  # no heartbeats but the first


class DictStore(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


class StuckStore(DictStore):
    """Answers no more once it is `stuck`, like one behind a network that is cut, until it is `released`."""

    def __init__(self):
        self.stuck, self.released = threading.Event(), threading.Event()

    def check(self, keys):
        assert not self.stuck.is_set() or self.released.wait(540)
        return super().check(keys)


class Alone(Watchdog):
    """The watchdog and the guard of a job of one rank, or of the first of `world`; `left` are the codes of its ends."""

    def __init__(self, store=None, limits=LIMITS, world=1, **guard):
        self.left, self._ended, store = [], threading.Event(), store or DictStore()

        def leave(code):
            self.left.append(code)
            self._stopping.set()
            self._ended.set()
            if isinstance(store, StuckStore):
                store.released.set()

        guard = Guard(0, **{"grace_seconds": 540, **guard}, exit_process=leave)
        super().__init__(store, 0, world, limits, guard)

    def __enter__(self):
        self.guard.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.guard.__exit__(*error)

    def await_end(self):
        assert self._ended.wait(540)
        return self.left


@pytest.fixture
def quick(monkeypatch):
    """A guard that looks more often, and takes no two signals for one."""
    monkeypatch.setattr("rlhfuse.monitor.guard.TICK_SECONDS", 0.05)
    monkeypatch.setattr("rlhfuse.monitor.guard.SAME_SIGNAL_SECONDS", 0.0)


def send(number):
    os.kill(os.getpid(), number)


def test_sigterm_is_heard_through_a_descriptor_of_1024_or_more():
    """As in a job of a thousand ranks, whose sockets have the numbers before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    files = []
    try:
        files += [open(os.devnull) for _ in range(1100)]
        with Alone() as watchdog:
            assert watchdog.guard._wake_read.fileno() >= 1024
            os.kill(os.getpid(), signal.SIGTERM)
            assert watchdog.await_end() == [143]
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ctrl_c_lets_the_iteration_end_and_a_second_one_does_not(monkeypatch, capfd):
    monkeypatch.setattr("rlhfuse.monitor.guard.SAME_SIGNAL_SECONDS", 0.0)
    with Alone() as watchdog:
        watchdog.guard.finishing = "iteration 3 of 9 is finished first"
        watchdog.guard.go_on = "go on with: program --again"
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: watchdog.guard.stop_asked)
        said = capfd.readouterr().err
        limit = "within 540 s (trainer.grace_seconds)"
        assert said == f"stopping: iteration 3 of 9 is finished first, {limit}; Ctrl-C once more ends it now\n"
        assert not watchdog.left
        os.kill(os.getpid(), signal.SIGINT)
        assert watchdog.await_end() == [130]
    said = capfd.readouterr().err
    assert "interrupted before the end of: iteration 3 of 9" in said and said.endswith(
        "; go on with: program --again\n"
    )


def test_ctrl_c_with_nothing_to_finish_interrupts():
    with pytest.raises(KeyboardInterrupt, match="interrupted in: start; start the same command again"):
        with Alone() as watchdog:
            os.kill(os.getpid(), signal.SIGINT)
            watchdog._ended.wait(540)
    assert watchdog._table.heartbeats == [] and not watchdog.left


def test_usr1_asks_for_an_end_and_the_launchers_patience_is_kept(monkeypatch, tmp_path, quick):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5.6")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with Alone() as watchdog:
        watchdog.guard.finishing, watchdog.guard.go_on = "iteration 3 of 9", "go on with: program --again"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watchdog.await_end()[0] == 130 and watchdog.guard.stop_asked
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told.startswith("not done in time, 1 s (--shutdown-timeout): iteration 3 of 9; this is rank 0")
    assert told.endswith("; go on with: program --again")


def test_a_checkpoint_that_is_written_is_waited_for_at_the_end():
    asked, saved = threading.Event(), threading.Event()
    with Alone() as watchdog:
        watchdog.guard.is_saving = lambda: (asked.set(), not saved.is_set())[1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(540) and not watchdog.left
        saved.set()
        assert watchdog.await_end() == [143]


@pytest.fixture
def stuck(quick, monkeypatch):
    """A store that does not answer; the thread that asks it is held up, and no limit is met by a busy machine alone."""
    monkeypatch.setattr("rlhfuse.monitor.watchdog.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("rlhfuse.monitor.watchdog.GRACE_SECONDS", 0.0)
    store = StuckStore()
    store["watchdog/1"] = b""
    store.stuck.set()
    yield store
    store.released.set()


def asks(watchdog):
    """Whether the store owes it an answer."""
    return watchdog._asked < math.inf


def test_a_store_that_does_not_answer_ends_the_rank_by_name(stuck, capfd):
    limits = Limits(watchdog_seconds=0.3, interval_seconds=0.01)
    watchdog = Alone(stuck, limits, world=2)
    watchdog.guard.doing = "generation step 12"
    with watchdog:
        assert watchdog.await_end() == [1]
    said = capfd.readouterr().err
    assert said.startswith("watchdog: the job's store has not answered for 0 s: this machine (" + socket.gethostname())
    assert "or the machine of the store is; this is rank 0, which was in: generation step 12" in said


@pytest.mark.parametrize(
    "numbers, code, words",
    [
        ((signal.SIGTERM,), 143, "terminated by SIGTERM; the job's store has not answered for "),
        ((signal.SIGUSR1,), 130, "stopped by SIGUSR1 in: start; the job's store has not answered for "),
        ((signal.SIGUSR1, signal.SIGUSR1), 130, "interrupted before the end of: iteration 3; the job's store has not"),
        ((signal.SIGINT, signal.SIGUSR1), 130, "interrupted before the end of: iteration 3; the job's store has not"),
    ],
)
def test_signals_are_answered_while_the_store_is_not(stuck, capfd, numbers, code, words):
    with Alone(stuck, world=2) as watchdog:
        watchdog.guard.finishing = "iteration 3" if numbers[1:] else ""
        eventually(lambda: asks(watchdog))
        for number in numbers:
            assert not watchdog.left
            send(number)
            eventually(lambda: watchdog.left or watchdog.guard.stop_asked)
        assert watchdog.await_end()[0] == code
    assert words in capfd.readouterr().err


def test_a_block_that_ends_while_the_store_does_not_answer_ends_all_the_same(stuck):
    """By an error of the main thread, say, because of the same network."""
    with pytest.raises(ConnectionError):
        with Alone(stuck, Limits(watchdog_seconds=0.3, interval_seconds=0.01), 2) as watchdog:
            eventually(lambda: asks(watchdog))
            raise ConnectionError
    assert watchdog.left[0] == 1


@pytest.mark.parametrize(
    "naps, ends", [([1] * 62, False), ([1] * 64, True), ([1, 90, 1], False), ([90, *[1] * 64], True)]
)
def test_a_rank_that_was_suspended_gives_the_store_its_time_anew(monkeypatch, naps, ends):
    """As by `scontrol suspend`; the watchdog's 60 s are over after 3 s more."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("rlhfuse.monitor.watchdog.time", clock)
    watchdog = Watchdog(DictStore(), 0, 1, LIMITS, Guard(0, 540))
    assert watchdog.unanswered(None) is None
    watchdog._asked = clock.now
    for nap in naps:
        assert watchdog.unanswered(None) is None
        clock.now += nap
    assert bool(watchdog.unanswered(None)) == ends
    watchdog._asked = math.inf
    assert watchdog.unanswered(None) is None


@pytest.mark.parametrize(
    "error, died",
    [
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?", True),
        ("Broken pipe", True),
        ("Connection reset by peer", True),
        ("Connection refused", True),
        ("Connection timed out", False),
        ("No route to host", False),
    ],
)
def test_a_launcher_has_died_only_where_its_connection_was_closed(error, died):
    told = _unreachable(RuntimeError(error)).report
    assert ("its launcher has died" in told) == died and ("is cut off" in told) != died


# what whoever started the run finds -----------------------------------------------------------------------------


def noted(tmp_path, **guard):
    watchdog = Alone(**guard)
    watchdog.guard.file, watchdog.guard.go_on = tmp_path / "run" / "preempted", "go on with: program --again"
    return watchdog


def test_a_notice_with_nothing_to_finish_ends_the_rank_and_says_so(tmp_path, quick):
    with noted(tmp_path) as watchdog:
        send(signal.SIGUSR1)
        assert watchdog.await_end() == [130]
    said = watchdog.guard.file.read_text()
    assert said.startswith("stopped by SIGUSR1 in: start;") and said.endswith("; go on with: program --again\n")


def test_a_notice_that_is_heard_together_with_sigterm_is_told(tmp_path, quick):
    """torchrun that is given notice twice ends its ranks by SIGTERM a moment after the first."""
    with noted(tmp_path) as watchdog:
        watchdog.guard.finishing = "iteration 3 of 9"
        watchdog.guard._wake_write.send(bytes([signal.SIGUSR1, signal.SIGTERM]))
        assert watchdog.await_end() == [143]
    assert watchdog.guard.file.read_text().startswith("terminated by SIGTERM; ")


def test_a_run_that_was_stopped_by_hand_is_not_to_go_on_by_a_later_notice(tmp_path, quick):
    with noted(tmp_path) as watchdog:
        watchdog.guard.finishing = "iteration 3 of 9"
        send(signal.SIGINT)
        eventually(lambda: watchdog.guard.stop_asked)
        send(signal.SIGUSR1)
        assert watchdog.await_end() == [130]
    assert not watchdog.guard.file.exists()


def test_a_notice_before_there_is_a_store_is_heard(tmp_path, quick):
    left, ended = [], threading.Event()
    guard = Guard(0, 540, exit_process=lambda code: (left.append(code), ended.set()))
    guard.file = tmp_path / "preempted"
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # as while modules load
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # other threads of this process do not block it
    with guard:
        assert ended.wait(540)
    assert left == [130] and "stopped by SIGUSR1 in: start" in guard.file.read_text()


def test_the_end_of_the_time_is_a_notice_and_the_grace_ends(tmp_path, quick):
    with noted(tmp_path, stop_after_seconds=process_seconds() + 0.2, grace_seconds=0.3) as watchdog:
        watchdog.guard.finishing = "iteration 3 of 9 is finished and saved first"
        eventually(lambda: watchdog.guard.stop_asked)
        assert watchdog.guard.notice and watchdog.guard.seconds_left() < 0
        assert watchdog.await_end() == [130]
    told = "not done in time, 0 s (trainer.grace_seconds): iteration 3 of 9 is finished and saved first"
    assert watchdog.guard.file.read_text().startswith(told)


def test_an_iteration_is_finished_after_a_notice_and_ctrl_c_leaves_no_word(tmp_path, quick):
    for number, first in ((signal.SIGINT, ""), (signal.SIGUSR1, "stopped by SIGUSR1: iteration 3 of 9; go on")):
        with noted(tmp_path) as watchdog:
            watchdog.guard.finishing = "iteration 3 of 9"
            send(number)
            eventually(lambda: watchdog.guard.stop_asked)
            assert watchdog.guard.notice == bool(first)
        assert not watchdog.left and watchdog.guard.file.exists() == bool(first)
        assert not first or watchdog.guard.file.read_text().startswith(first)
    file = watchdog.guard.file
    watchdog.guard.forget()  # it was the last
    watchdog.guard.note("late")
    assert not file.exists()


@pytest.mark.parametrize(
    "command, variable, seconds",
    [
        ("torchrun --shutdown-timeout 90 a.py", "40", 90),
        ("torchrun --shutdown_timeout=90 a.py", "", 90),
        ("torchrun a.py", "40", 40),
        ("torchrun a.py --shutdown-timeouts 3", "", 30),
    ],
)
def test_the_launchers_patience_is_read_where_it_is_said(monkeypatch, command, variable, seconds):
    monkeypatch.setattr("rlhfuse.base.launcher.launcher_command", command.split)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if variable:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    guard = Guard(0, 600)
    assert (guard._grace, guard._limit) == (seconds - 5, "--shutdown-timeout")
    assert Guard(0, 7)._limit == "trainer.grace_seconds"
