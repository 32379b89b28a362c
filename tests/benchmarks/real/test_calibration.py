"""The constants fitted to published timings: errors, that they are the fit's result, and that of held-out tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from real.calibration import (
    FITTED,
    compare,
    end_to_end_seconds,
    fit_calibration,
    fit_loss,
    mean_error,
)
from real.tables import BATCH, EAGER_END_TO_END, END_TO_END, real_models, real_rows

from rlhfuse.costs.hardware import REAL_H100

ROWS = real_rows()


def test_the_published_rows_are_complete():
    assert len(ROWS) == 28 and sum(row.eager for row in ROWS) == 4 and sum(row.derived for row in ROWS) == 2
    assert [row.seconds for row in ROWS if row.eager] == [349.4, 607.3, 34.5, 104.6]
    for row in ROWS:  # a mesh is whole: dp x tp x pp ranks on nodes of eight
        assert row.layout.size == 8 * (row.nodes[1] - row.nodes[0] + 1), row
    totals = {"7B": 8030261248, "13B": 14001525760, "34B": 35321028608, "70B": 70553706496}
    assert {name: spec.parameters() for name, spec in real_models().items()} == totals


def test_the_calibrated_model_is_within_the_goals_of_every_published_row():
    errors = compare(ROWS, REAL_H100)
    assert mean_error(errors) <= 0.06 and max(abs(one.error) for one in errors) <= 0.35
    for table in BATCH:
        own = [row for row in ROWS if row.table == table]
        assert mean_error(compare(own, REAL_H100)) <= 0.10
        assert end_to_end_seconds(own, REAL_H100) == pytest.approx(END_TO_END[table], rel=0.10)
        assert end_to_end_seconds(own, REAL_H100, eager=True) == pytest.approx(EAGER_END_TO_END[table], rel=0.10)


def test_the_shipped_constants_are_a_minimum_of_the_fit():
    """No constant can be moved by 2% for a smaller loss, except beyond its credible range."""
    best = fit_loss(ROWS, REAL_H100)
    for key, (low, high) in FITTED.items():
        for factor in (0.98, 1.02):
            moved = replace(REAL_H100, **{key: min(max(getattr(REAL_H100, key) * factor, low), high)})
            assert fit_loss(ROWS, moved) >= best * (1 - 1e-3), (key, factor)


def test_a_fit_finds_constants_that_made_the_rows():
    """Rows made by known constants; the start is far from them."""
    true = replace(REAL_H100, gemm=0.45, node_link=0.5, call_seconds=1.0, decode_layer_seconds=1e-4)
    made = [replace(one.row, seconds=one.predicted) for one in compare(ROWS, true)]
    found = fit_calibration(made, "found")
    for key in ("gemm", "node_link", "call_seconds", "decode_layer_seconds"):
        assert getattr(found, key) == pytest.approx(getattr(true, key), rel=0.03), key


def test_the_shipped_constants_are_what_the_fit_gives():
    assert fit_calibration(ROWS, REAL_H100.name) == REAL_H100


@pytest.mark.parametrize("table", BATCH)
def test_a_table_is_predicted_by_constants_fitted_to_the_others(table):
    fitted = fit_calibration([row for row in ROWS if row.table != table], f"without {table}")
    assert mean_error(compare([row for row in ROWS if row.table == table], fitted)) <= 0.12
