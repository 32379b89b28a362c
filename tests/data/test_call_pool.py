"""Calls in processes: whatever becomes of one, the others come to their own end."""

import pytest

from rlhfuse.data.call_pool import CallPool

SOURCE = """
import asyncio, os, time

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
        return call * 2

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
    calls = pool("Waits", workers=1, timeout=3.0)
    calls.submit(["beside", "blocks"])
    found = []
    while len(found) < 2:
        found += calls.outcomes(0.05)
    told = {one.call: one.error for one in found}
    assert set(told.values()) <= {
        "blocks: no result after 3 s (some.key)",
        "beside: no result after 3 s (some.key)",
        "beside: a call beside it, that does not await, held up its process",
        "blocks: a call beside it, that does not await, held up its process",
    }
    assert all_of(calls, ["fine"]) == [MADE[1]]
