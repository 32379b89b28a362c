"""What R_t does while a run goes on, without a run: steadiness and the words of the log."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "simulator"))

from sim_helpers import limits, linear_cost, long_tail  # noqa: E402

from rlhfuse.simulator.lines import Line, LineTable  # noqa: E402
from rlhfuse.simulator.threshold import sweep_threshold  # noqa: E402
from rlhfuse.threshold_control import WORTH_MOVING, changes, spoken, steady  # noqa: E402


def test_small_gains_do_not_move_it():
    found = sweep_threshold(long_tail(64), 4, linear_cost(), limits())
    best = found.fused_seconds
    assert steady(found, (7,), best * (1 + WORTH_MOVING)) == (7,)
    assert steady(found, (7,), best * (1 + 2 * WORTH_MOVING)) == found.triggers
    assert steady(found, (), found.serial_seconds) == found.triggers != ()


def test_the_log_names_costs_that_changed():
    before = linear_cost()
    assert changes(before, before, limits(), 100.0) == "costs within 10%"
    slower_tail = LineTable((("decoding", Line(10e-3, (1e-3, 1e-6))), ("scoring", Line(20e-3, (2e-3, 2e-6)))))
    after = replace(before, decode=slower_tail, swap_in=0.25)
    assert changes(before, after, limits(), 100.0) == "tail's decode step +100%, loading -50%"


def test_triggers_in_words():
    assert [spoken(triggers) for triggers in ((), (12,), (12, 3))] == ["0", "12", "12, then 3"]
