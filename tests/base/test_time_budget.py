"""Work with an allowance takes its part of the time, whatever it costs."""

import pytest
from testkit.manual_clock import ManualClock

from rlhfuse.base.time_budget import TimeBudget


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1])
def test_it_takes_its_share(cost):
    clock = ManualClock()
    allowance, spent = TimeBudget(0.01, clock), 0.0
    begin = clock.seconds
    for _ in range(1000):
        clock.seconds += 2.0
        if allowance.due():
            with allowance.spend():
                clock.seconds += cost
            spent += cost
    share = spent / (clock.seconds - begin)
    assert share <= 0.01 * (1 + 1e-9) + cost / (clock.seconds - begin)  # the first is done at once
    assert share >= min(cost / (2.0 + cost), 0.01) * 0.75  # not much seldomer than it may be


def test_it_is_due_at_first_and_again_after_what_it_cost():
    clock = ManualClock()
    allowance = TimeBudget(0.5, clock)
    assert allowance.due()
    with pytest.raises(ZeroDivisionError), allowance.spend():
        clock.seconds += 1.0
        1 / 0  # failed work has cost the same
    assert not allowance.due()
    clock.seconds += 0.9
    assert not allowance.due()
    clock.seconds += 0.1
    assert allowance.due()
