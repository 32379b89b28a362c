"""Wrong constants: the price of a table on another machine is the price that a search there finds."""

from dataclasses import replace

import pytest
from layout_search.sensitivity import CONSTANTS, FACTORS, seconds_of, sensitivity, with_constant
from testkit.search_cases import GPUS, known

from rlhfuse.planning.search.search import Ranking

ROWS = dict(parallel__generation="d2t2p1", parallel__inference="d2t2p1", fusion__actor_microbatches=2)
SIXTEEN = dict(world_size=16, **GPUS, parallel__generation="d8t2p1")


def test_priced_again_on_the_same_machine_a_table_has_its_price():
    made, rows = known(4, **GPUS, **ROWS)
    assert [seconds_of(made, row) for row in rows[:20]] == pytest.approx([row.seconds for row in rows[:20]])


@pytest.mark.parametrize("keys", [{"world_size": 2}, pytest.param(SIXTEEN, marks=pytest.mark.ci)])
def test_a_constant_that_is_wrong_is_told_with_what_would_have_been_better(keys):
    more = dict(fusion__actor_microbatches=1, trainer__recompute="none", parallel__sequence_parallel=False)
    made, rows = known(**keys, **more)
    swings = list(sensitivity(made, rows))
    constants = [name for name in CONSTANTS if getattr(made.inputs.hardware, name)]
    assert [(swing.constant, swing.factor) for swing in swings] == [(name, by) for name in constants for by in FACTORS]
    for swing in swings[:4]:
        value = getattr(made.inputs.hardware, swing.constant) * swing.factor
        there = with_constant(made, swing.constant, value)
        assert getattr(there.inputs.hardware, swing.constant) == value
        best = Ranking(there).fastest(1).best.seconds
        assert best == seconds_of(there, rows[swing.winner - 1])
        assert swing.behind == seconds_of(there, rows[0]) / best - 1 >= 0
    assert all((swing.behind > 0) == (swing.winner > 1) for swing in swings)


def test_a_table_that_no_longer_fits_is_no_winner():
    made, (row, *_) = known(2, **GPUS)
    tight = replace(made, run=made.run.with_config(made.config.with_(trainer={"memory_limit_gb": 0.001})))
    assert seconds_of(tight, row) == float("inf") and list(sensitivity(tight, [row])) == []
