"""A run directory belongs to one run: refused while that lives, taken over when it is dead, free when it has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from testkit.small_disk import small_files

from rlhfuse.base.errors import InputError
from rlhfuse.monitor.heartbeat import ProcessName
from rlhfuse.monitor.run_lock import RUN_LOCK, RunLock

OWNER = """
import sys
from pathlib import Path
from rlhfuse.monitor.run_lock import RunLock
RunLock(Path(sys.argv[1])).__enter__()
print("owned", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns tmp_path."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def take(folder: Path, renew: float = 0.05, dead_after: float = 0.5) -> None:
    with RunLock(folder, renew, dead_after) as lock:
        lock.check()


def write_lock(folder: Path, **other: object) -> Path:
    file = folder / RUN_LOCK
    file.write_text(json.dumps(asdict(replace(ProcessName.own(), **other))))
    return file


def test_a_live_owner_is_named_and_a_dead_one_followed(tmp_path, owner, capsys):
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
def test_an_owner_elsewhere_is_dead_when_it_renews_no_more(tmp_path, text):
    file = write_lock(tmp_path, host="far", machine="far 1")
    if text is not None:  # killed while it wrote
        file.write_text(text)
    begin = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - begin >= 0.5


def test_an_owner_elsewhere_is_alive_while_it_renews(tmp_path):
    file = write_lock(tmp_path, host="far", machine="far 1", pid=7)
    ended = threading.Event()

    def renew():
        while not ended.wait(0.05):
            os.utime(file)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(InputError, match=f"alive, pid 7 on far: .* delete {file}"):
            take(tmp_path, dead_after=60)
    finally:
        ended.set()
        thread.join()


def test_the_owner_renews_and_sees_that_it_has_lost_the_folder(tmp_path):
    with RunLock(tmp_path, renew_seconds=0.05) as lock:
        file = tmp_path / RUN_LOCK
        first = file.stat().st_mtime_ns
        until = time.monotonic() + 30
        while file.stat().st_mtime_ns == first:
            assert time.monotonic() < until, "never renewed"
            time.sleep(0.02)
        write_lock(tmp_path, pid=1)
        with pytest.raises(InputError, match="another one has taken"):
            lock.check()
    assert file.exists(), "it is the other one's"


def test_two_takers_of_a_dead_lock_are_one_owner(tmp_path):
    """The second has seen the dead one, too, when the first has its own lock there already."""
    write_lock(tmp_path, machine="another", host="far")
    second = RunLock(tmp_path, 0.05, 0.2)
    dead = second._await_end()
    with RunLock(tmp_path, 0.05, 0.2) as first:
        second._take_away(dead)
        first.check()
        assert not second._create()
    assert [one.name for one in tmp_path.iterdir()] == []
