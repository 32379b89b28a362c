"""A clock that is set while a run measures changes nothing that it measures."""

import time

from rlhfuse.base.clock import wall_seconds


def test_a_clock_that_is_set_does_not_jump(monkeypatch):
    before = wall_seconds()
    assert abs(before - time.time()) < 3600
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda now=before + jump: now)
        assert before < wall_seconds() < before + 3600
