"""A run directory belongs to one run: refused while that lives, taken over when it is dead, free when it has ended."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from testkit.programs import eventually
from testkit.small_disk import small_files

from rlhfuse.base.errors import InputError
from rlhfuse.monitor import run_lock
from rlhfuse.monitor.heartbeat import ProcessName
from rlhfuse.monitor.run_lock import DEAD_AFTER_SECONDS, RENEW_SECONDS, RUN_LOCK, RunLock

OWNER = """
import signal, sys
from pathlib import Path
from rlhfuse.monitor.run_lock import RunLock
RunLock(Path(sys.argv[1])).__enter__()
print("owned", flush=True)
signal.pause()
"""


class SteppedClock:
    """Nobody waits: a sleep moves it on, and `slept(number)` says what happens meanwhile."""

    def __init__(self, slept=lambda number: None) -> None:
        self.now, self.sleeps, self._slept = 0.0, 0, slept

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.sleeps = self.now + seconds, self.sleeps + 1
        self._slept(self.sleeps)


@pytest.fixture
def stepped(monkeypatch):
    """Give the lock a clock of its own."""

    def use(*slept) -> SteppedClock:
        monkeypatch.setattr(run_lock, "time", clock := SteppedClock(*slept))
        return clock

    return use


def take(folder: Path) -> None:
    with RunLock(folder) as lock:
        lock.check()


def write_lock(folder: Path, **other: object) -> Path:
    file = folder / RUN_LOCK
    file.write_text(json.dumps(asdict(replace(ProcessName.own(), **other))))
    return file


def test_a_live_owner_is_named_and_a_dead_one_followed(tmp_path, programs, capsys):
    owner = programs.start(sys.executable, "-c", OWNER, tmp_path)
    assert owner.stdout.readline() == "owned\n"
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            take(tmp_path)
        assert f"{tmp_path} belongs to a run that is alive, pid {owner.pid} on " in str(caught.value)
        assert str(tmp_path / RUN_LOCK) in str(caught.value) and "\n" not in str(caught.value)
    owner.kill()
    owner.wait()
    take(tmp_path)
    assert f"taking {tmp_path} over from pid {owner.pid}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [None, InputError, KeyboardInterrupt, RuntimeError])
def test_it_goes_with_the_block_however_that_ends(tmp_path, error):
    try:
        with RunLock(tmp_path):
            assert json.loads((tmp_path / RUN_LOCK).read_text())["pid"] == os.getpid()
            if error:
                raise error
    except (InputError, KeyboardInterrupt, RuntimeError) as raised:
        assert type(raised) is error
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_finds_no_room_is_not_left_half(tmp_path):
    with small_files(10), pytest.raises(InputError, match="cannot write .*run.lock: File too large; free space there"):
        take(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_was_used_again_is_not_taken_for_the_owner(tmp_path):
    write_lock(tmp_path, started="1")  # this very process, but for the time of its start
    take(tmp_path)


@pytest.mark.parametrize("text", [None, "", '{"pid'])
def test_an_owner_elsewhere_is_dead_when_it_renews_no_more(tmp_path, stepped, text):
    file = write_lock(tmp_path, host="far", machine="far 1")
    if text is not None:  # killed while it wrote
        file.write_text(text)
    clock = stepped()
    take(tmp_path)
    assert DEAD_AFTER_SECONDS <= clock.now < DEAD_AFTER_SECONDS + RENEW_SECONDS


def test_an_owner_elsewhere_is_alive_while_it_renews(tmp_path, stepped):
    file = write_lock(tmp_path, host="far", machine="far 1", pid=7)
    clock = stepped(lambda number: os.utime(file, (number, number)) if number == 5 else None)
    with pytest.raises(InputError, match=f"alive, pid 7 on far: .* delete {file}"):
        take(tmp_path)
    assert clock.sleeps == 5


def test_the_owner_renews_and_sees_that_it_has_lost_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhfuse.monitor.run_lock.RENEW_SECONDS", 0.01)
    with RunLock(tmp_path) as lock:
        file = tmp_path / RUN_LOCK
        first = file.stat().st_mtime_ns
        eventually(lambda: file.stat().st_mtime_ns != first, "never renewed")
        write_lock(tmp_path, pid=1)
        with pytest.raises(InputError, match="another one has taken"):
            lock.check()
    assert file.exists(), "it is the other one's"


def test_two_takers_of_a_dead_lock_are_one_owner(tmp_path, stepped):
    """The second has seen the dead one, too, when the first has its own lock there already."""
    stepped()
    write_lock(tmp_path, machine="another", host="far")
    second = RunLock(tmp_path)
    dead = second._await_end()
    with RunLock(tmp_path) as first:
        second._take_away(dead)
        first.check()
        assert not second._create()
    assert [one.name for one in tmp_path.iterdir()] == []
