"""An iteration's seconds are the sum of its parts'."""

import pytest

from rlhfuse.simulator.iteration_seconds import IterationSeconds


def test_an_iteration_adds_its_parts():
    seconds = IterationSeconds(0.75, 3.0, 2.0, 6.0, 4.5, capture=0.25)
    assert (seconds.serial, seconds.fused) == (10.0, 7.5)
    assert seconds.speedup == pytest.approx(10.0 / 7.5)
