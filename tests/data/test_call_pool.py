"""Calls in processes: whatever becomes of one, the others come to their own end."""

import itertools
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
from testkit.programs import eventually

from rlhfuse.data import call_pool
from rlhfuse.data.call_pool import CallPool

SOURCE = """
import asyncio, os, signal, sys, time
from pathlib import Path

here = Path(__file__).with_name

class Plain:
    is_async = False

    def about(self, call):
        return f"{call}:"

    def invoke(self, call):
        if call == "raises":
            raise ValueError("no")
        if call == "leaves":
            raise SystemExit(0)
        if call == "dies":
            os._exit(5)
        if call == "forever":
            time.sleep(1e6)
        if call.startswith("signal"):  # signal SIGKILL 2: in the first two tries
            _, name, times = call.split()
            if self.tries(name) <= int(times):
                os.kill(os.getpid(), getattr(signal, name))
                time.sleep(1e6)
        if call.startswith("errno"):
            _, number, times = call.split()
            if self.tries(number) <= int(times):
                raise OSError(int(number), "a disk")
        if call.startswith("close"):
            for number in call.split()[1:]:
                os.close(int(number)) if number.isdigit() else getattr(sys, number).close()
        if call == "print":
            print("said", flush=True), os.fstat(0), os.fstat(2)
        if call == "waits":
            here("began").touch()
            while not here("go").exists():
                time.sleep(0.01)
        return call * 2

    def tries(self, name):
        with open(here(name), "a") as file:
            file.write("x")
        return here(name).stat().st_size

    def result(self, returned, call):
        return len(returned)

    def failed(self, error, call):
        return f"{call}: {type(error).__name__}"

class Waits(Plain):
    is_async = True

    async def invoke(self, call):
        if call == "forever":
            await asyncio.sleep(1e6)
        if call == "blocks":
            time.sleep(1e6)
        if call == "beside":
            await asyncio.sleep(1e5)
        await asyncio.sleep(0.01)
        return super().invoke(call)
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Makes pools of a class of SOURCE; all are ended."""
    (tmp_path / "callees_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def start(name, workers=2, timeout=540.0):
        import callees_of_a_test

        made.append(CallPool(getattr(callees_of_a_test, name), (), workers, timeout, "some.key"))
        return made[-1]

    yield start
    for one in made:
        one.close()


def all_of(pool, calls):
    pool.submit(calls)
    found = []
    while len(found) < len(calls):
        found += pool.outcomes(0.05)
    assert pool.outcomes() == [] and pool.under_way() == 0
    return sorted((one.call, one.value, one.error) for one in found)


MADE = [
    ("dies", None, "dies: its process ended with exit code 5"),
    ("fine", 8, ""),
    ("raises", None, "raises: ValueError"),
]


@pytest.mark.parametrize("name", ["Plain", "Waits"])
def test_a_call_that_fails_fails_alone(pool, name):
    """Async ones fail together where their process ends."""
    calls = pool(name, workers=1 if name == "Plain" else 3)
    assert calls.at_once == (64 if name == "Waits" else 1)
    if name == "Plain":
        assert all_of(calls, ["fine", "raises", "leaves", "dies"]) == sorted(
            [*MADE, ("leaves", None, "leaves: SystemExit")]
        )
        assert all_of(calls, ["fine"] * 5) == [MADE[1]] * 5
    else:
        assert all_of(calls, ["fine", "raises"]) == MADE[1:]
        assert all_of(calls, ["dies"]) == MADE[:1]
        assert all_of(calls, ["fine"] * 200) == [MADE[1]] * 200


@pytest.mark.parametrize("name", ["Plain", "Waits"])
def test_a_call_that_is_late_leaves_its_neighbours_alone(pool, name):
    late, calls = ("forever", None, "forever: no result after 3 s (some.key)"), pool(name, timeout=3.0)
    assert all_of(calls, ["forever", *["fine"] * 9]) == [*[MADE[1]] * 9, late]
    calls.submit(["forever"])
    assert calls.under_way() == 1


def test_one_that_does_not_await_holds_up_its_process_alone(pool):
    """What ran beside it is made again."""
    calls = pool("Waits", workers=1, timeout=3.0)
    late = "no result after 3 s (some.key)"
    assert all_of(calls, ["beside", "blocks", "fine"]) == [
        ("beside", None, f"beside: {late}"),
        ("blocks", None, f"blocks: {late}"),
        MADE[1],
    ]
    assert all_of(calls, ["fine"]) == [MADE[1]]


def test_what_ran_beside_a_call_that_ends_its_process_is_made_again(pool):
    assert all_of(pool("Waits", workers=1), ["fine", "dies", "fine", "dies"]) == [MADE[0]] * 2 + [MADE[1]] * 2


FOREIGN, OWN = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGBUS", "SIGXCPU"), ("SIGSEGV", "SIGABRT", "SIGFPE")
DISK = ("28", "5", "24", "122")  # no space, an error of the disk, too many open files, the quota


@pytest.mark.parametrize("name", ["Plain", "Waits"])
def test_what_the_machine_ends_is_made_again_and_never_an_answer(pool, name):
    calls = pool(name)
    again = [f"signal {one} {times}" for times, one in zip((1, 2) * 3, FOREIGN)]
    again += [f"errno {number} {times}" for times, number in zip((1, 2) * 2, DISK)]
    assert all_of(calls, again) == sorted((call, len(call) * 2, "") for call in again)
    assert "exit code -12, 3 times" in all_of(calls, ["signal SIGUSR2 9"])[0][2]
    calls.submit(["errno 28 99"])
    [lost] = next_of(calls)
    assert lost.lost and "OSError" in lost.error
    for own in OWN:
        [(_, value, error)] = all_of(calls, [f"signal {own} 1"])
        assert error.endswith(f"exit code {-getattr(signal, own)}")


def next_of(calls):
    found = []
    eventually(lambda: found.extend(calls.outcomes()) or found)
    return found


def workers_of(pool):
    return {worker.process.pid for worker in pool._workers if worker.ready}


def test_a_process_that_is_killed_while_it_is_idle_is_replaced(pool):
    calls = pool("Plain")
    eventually(lambda: len(workers_of(calls)) == 2)
    before = workers_of(calls)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert all_of(calls, ["fine"] * 4) == [MADE[1]] * 4
    assert not before & workers_of(calls)


@pytest.mark.parametrize("name", ["Plain", "Waits"])
@pytest.mark.parametrize("what", ["0 1 2", "1", "stdin", "stdout stderr"])
def test_a_call_that_breaks_its_process_fails_none_after_it(pool, name, what):
    calls = pool(name, workers=1)
    for _ in range(2):
        assert [error for *_, error in all_of(calls, [f"close {what}"])] == [""]
        assert all_of(calls, ["print"] * 2) == [("print", 10, "")] * 2


def test_time_in_which_a_process_was_stopped_does_not_count(pool, tmp_path, monkeypatch):
    """By a clock of which a second goes by at every look."""
    calls, looks = pool("Plain", workers=1, timeout=60.0), itertools.count()
    calls.submit(["waits"])
    eventually((tmp_path / "began").exists)
    worker = psutil.Process(*workers_of(calls))
    worker.suspend()
    eventually(lambda: worker.status() == psutil.STATUS_STOPPED)
    monkeypatch.setattr(call_pool, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    eventually(lambda: next(looks) > 200)
    monkeypatch.undo()
    (tmp_path / "go").touch()
    worker.resume()
    assert [(one.value, one.error) for one in next_of(calls)] == [(10, "")]


def test_one_look_counts_a_second_at_most(monkeypatch):
    """As it is after a job was stopped, a machine slept, or a clock was set."""
    now = [5.0]
    monkeypatch.setattr(call_pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker = call_pool._Worker(psutil.Process(), None)  # pyright: ignore[reportArgumentType]
    worker.now()
    before = worker.seconds
    for jump in (0.25, 1e6, 3.0):
        now[0] += jump
        worker.now()
    assert worker.seconds - before == 2.25
