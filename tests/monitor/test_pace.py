"""The pace of a rank: how long work lasts, what is late, and when a run is evidence; by a clock of the test's own."""

from types import SimpleNamespace

import pytest
from testkit.manual_clock import ManualClock
from testkit.paced import paced

from rlhfuse.monitor import pace as module
from rlhfuse.monitor.pace import PacedClock, PaceStats
from rlhfuse.run.run_log import paced_line
from rlhfuse.schedule.ir.action import Action


class Late(ManualClock, PacedClock):
    """Every sleep ends a millisecond late."""

    seconds, late = 0.0, 0.001


@pytest.fixture
def cpu(monkeypatch):
    """CPU seconds of this process, which the test sets; those of the machine are ten times as many."""
    cpu = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("time.process_time", lambda: cpu.seconds)
    monkeypatch.setattr(module, "cpu_seconds", lambda: 10 * cpu.seconds)
    return cpu


def test_work_lasts_as_long_as_it_is_priced_from_its_beginning_on(cpu):
    clock, action = Late(0, paced({"actor": 1}, unit=1.0).prices(2)), Action.parse("actor:0B0")
    for kind, counts, seconds in (
        ("action", ("actor", action, 5), 2.0),
        ("step", (4, 100, 0), 1.0),
        ("step", (4, 100, 7), 2.0),
        ("score", (64, 2), 1.0),  # by one of the two models
        ("load", (), 0.5),
        ("migration", (3,), 1.0),
        ("move", ("actor",), 5.0),
    ):
        with clock.work(price=(kind, *counts)) as piece:
            clock.seconds += 0.25  # what the work took
        assert piece.seconds == pytest.approx(seconds + 0.001), kind
    assert clock.take_pace() == PaceStats(7, 0, pytest.approx(0.001), 0.0, 0.0)


def test_what_took_longer_is_late_and_what_has_no_price_is_not_counted(cpu):
    clock = Late(0, paced({"actor": 1}, unit=1.0).prices(1))
    clock.seconds = cpu.seconds = 1.5
    clock.hold(0.0, "step", 1, 1, 0)
    clock.hold(0.0, "action", "actor", Action.parse("actor:0RG"), 0)
    assert clock.seconds == 1.5
    assert clock.take_pace() == PaceStats(1, 1, 0.5, 1.5, 15.0)
    assert clock.take_pace() == PaceStats(0, 0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("machine, late, is_evidence", [(0.4, 1, True), (0.41, 0, False), (0.1, 2, False)])
def test_a_run_is_evidence_where_the_machine_has_time_and_little_is_late(machine, late, is_evidence):
    clock = PacedClock(0, {}, 5.0, "models, x5")
    ranks = [PaceStats(50, late, 0.25, 0.5, 20 * machine), PaceStats(50, 0, 0.0, 0.3, 20 * machine)]
    row = clock.pace_metrics(ranks, 10.0, 2.0)
    assert row["paced"] == f"models, x5: {'evidence' if is_evidence else 'no evidence'}"
    assert row["paced/late_share"] == late / 100 and row["paced/machine_cpu_share"] == machine
    assert row["paced/cpu_share"] == pytest.approx(0.04) and row["paced/python_share"] == 0.25
    told = paced_line([{"iteration": 0}, row])
    assert f"{int(is_evidence)} of 1 iterations are evidence" in told and "500 ms an iteration, 25% of it" in told


def test_other_runs_have_no_line_of_it():
    assert paced_line([{"iteration": 0}]) == ""
