"""Work is timed and recorded once; a clock that is set while a run measures changes nothing that it measures."""

import time

import pytest
from testkit.manual_clock import ManualClock

from rlhfuse.base.clock import Clock


def test_a_clock_that_is_set_does_not_jump(monkeypatch):
    clock = Clock()
    before = clock.now()
    assert abs(before - time.time()) < 3600
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda now=before + jump: now)
        assert before < clock.now() < before + 3600


def test_a_piece_of_work_is_timed_and_recorded_by_one_statement():
    clock = ManualClock(rank=3)
    with clock.work("score", tokens=7) as piece:
        clock.sleep(2.0)
        with clock.work() as waiting:
            clock.sleep(0.5)
        piece.waited += waiting.seconds
        assert piece.seconds == 2.0
    clock.sleep(10.0)
    assert piece.seconds == clock.seconds_of["score"] == 2.0
    assert [(s.kind, s.rank, s.start_seconds, s.end_seconds, s.args) for s in clock.spans] == [
        ("score", 3, 100.0, 102.5, {"tokens": 7})
    ]
    with clock.work("train", span=False), clock.work():  # without a span, without a name
        clock.sleep(1.0)
    with clock.work("wait"):  # takes no time
        pass
    with pytest.raises(ZeroDivisionError), clock.work("load"):
        1 / 0
    assert len(clock.spans) == 1 and clock.seconds_of == {"score": 2.0, "train": 1.0, "wait": 0.0}


def test_work_may_be_over_before_its_block():
    clock = ManualClock()
    with clock.work("generate") as busy:
        for _ in range(2):
            clock.sleep(1.0)
            busy.finish()
        clock.sleep(4.0)
    clock.span("wait", busy.end)
    assert [(s.kind, s.start_seconds, s.end_seconds) for s in clock.spans] == [
        ("generate", 100.0, 102.0),
        ("wait", 102.0, 106.0),
    ]


def test_rows_are_taken_once_and_a_record_is_begun_anew():
    clock = ManualClock()
    clock.observe("load", 1.5)
    assert clock.take_observed() == {"load": [[1.5]]} and not clock.take_observed()
    with clock.work("adv"):
        clock.sleep(1.0)
    clock.forget()
    assert not clock.spans and not clock.seconds_of
