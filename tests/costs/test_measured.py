"""Measured costs: the fit, a line for every neighbour, the file."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_helpers import linear_cost

from rlhfuse.costs.analytic import NEIGHBOURS
from rlhfuse.costs.lines import FEW, Line, LineTable
from rlhfuse.costs.measured import (
    BytesObservation,
    DecodeObservation,
    MeasuredCost,
    TokensObservation,
    load_measured_cost,
    save_measured_cost,
)
from rlhfuse.errors import InputError


def observe(costs: MeasuredCost, noise: float, seed: int = 0):
    """What a job that runs at `costs` would measure."""
    generator = np.random.default_rng(seed)

    def jitter(seconds: float) -> float:
        return seconds * (1 + noise * float(generator.standard_normal()))

    decode, prefill, score, migration = [], [], [], []
    for _ in range(200):
        batch, context = int(generator.integers(1, 64)), int(generator.integers(50, 20_000))
        decode.append(DecodeObservation(batch, context, jitter(costs.decode_step_seconds(batch, context))))
        tokens, sequences = int(generator.integers(10, 4000)), int(generator.integers(1, 32))
        prefill.append(TokensObservation(tokens, sequences, jitter(costs.prefill_seconds(tokens, sequences))))
        score.append(TokensObservation(tokens, sequences, jitter(costs.score_seconds(tokens, sequences))))
        volume = int(generator.integers(1, 10**8))
        migration.append(BytesObservation(volume, jitter(costs.migration_seconds(volume))))
    return decode, prefill, score, migration, [jitter(costs.swap_in_seconds()) for _ in range(9)]


def test_fit_recovers_the_costs():
    true = linear_cost()
    exact = MeasuredCost.fit(*observe(true, noise=0.0))
    decode = exact.decode.beside("idle")
    assert decode.constant == pytest.approx(10e-3) and decode.slopes == pytest.approx((1e-3, 1e-6))
    assert exact.migration.constant == pytest.approx(1e-3) and exact.swap_in == pytest.approx(0.5)
    noisy = MeasuredCost.fit(*observe(true, noise=0.05))
    for batch, context in ((1, 100), (16, 4000), (60, 15_000)):
        expected = true.decode_step_seconds(batch, context)
        assert noisy.decode_step_seconds(batch, context) == pytest.approx(expected, rel=0.1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=12))
def test_a_fit_is_non_negative_and_no_worse_than_a_constant(rows):
    line = Line.fit([row[:2] for row in rows], [row[2] for row in rows])
    assert line.constant >= 0 and min(line.slopes) >= 0
    seconds = [row[2] for row in rows]
    mean = sum(seconds) / len(seconds)
    error = math.fsum((line(*row[:2]) - row[2]) ** 2 for row in rows)
    assert error <= math.fsum((mean - value) ** 2 for value in seconds) * (1 + 1e-6) + 1e-12


def test_one_observation_is_enough_and_none_is_not():
    one = MeasuredCost.fit(
        [DecodeObservation(4, 400, 0.02)],
        [TokensObservation(100, 4, 0.01)],
        [TokensObservation(100, 4, 0.03)],
        [BytesObservation(1000, 0.001)],
        [0.2],
    )
    assert one.decode_step_seconds(4, 400) == pytest.approx(0.02)
    with pytest.raises(InputError, match="no migration observation"):
        MeasuredCost.fit(*observe(linear_cost(), 0.0)[:3], [], [0.1])
    with pytest.raises(InputError, match="seconds must be finite"):
        MeasuredCost.fit(*observe(linear_cost(), 0.0)[:4], [float("nan")])


def test_measured_costs_print_save_and_load(tmp_path):
    costs = MeasuredCost.fit(*observe(linear_cost(), noise=0.05))
    assert "decode" in str(costs) and "x batch" in str(costs)
    save_measured_cost(costs, tmp_path / "measured.json")
    assert load_measured_cost(tmp_path / "measured.json") == costs
    assert [file.name for file in tmp_path.iterdir()] == ["measured.json"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 4}, "version is 4"),
        ({"swap_in": "soon"}, "swap_in|no number"),
        ({"decode": {"idle": {"constant": 1.0, "slopes": [1.0]}}}, "decode beside idle needs a constant and 2 slopes"),
        ({"score": {"idle": {"constant": -1.0, "slopes": [1.0, 0.0]}}}, "finite and >= 0"),
        ({"score": {"busy": {"constant": 1.0, "slopes": [1.0, 0.0]}}}, "score: 'busy' is not known; use one of idle"),
        ({"prefill": {}}, "prefill has no line"),
        ({"prefill": 3}, "missing or no number"),
    ],
)
def test_bad_cost_files_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        MeasuredCost.from_dict({**linear_cost().to_dict(), **change}, "measured.json")


def test_every_neighbour_has_its_own_line():
    """Decoding costs 2.5x beside a neighbour that scores; each line comes from its own observations."""
    true, factor = linear_cost(), {"decoding": 1.0, "scoring": 2.5}
    decode = [
        DecodeObservation(batch, 50 * batch, factor[name] * true.decode_step_seconds(batch, 50 * batch), name)
        for name in factor
        for batch in range(1, 2 * FEW)
    ]
    costs = MeasuredCost.fit(decode, *observe(true, 0.0)[1:])
    alone = true.decode_step_seconds(4, 200)
    assert costs.beside("decoding").decode_step_seconds(4, 200) == pytest.approx(alone)
    assert costs.beside("scoring").decode_step_seconds(4, 200) == pytest.approx(2.5 * alone)
    assert costs.beside("idle").decode_step_seconds(4, 200) == pytest.approx(alone)  # the nearest one
    assert "as decoding: never observed" in str(costs)
    with pytest.raises(InputError, match="neighbour: 'asleep' is not known; use one of idle, decoding, scoring"):
        costs.beside("asleep")


def test_a_neighbour_seen_rarely_scales_the_line_of_all():
    rows = [((count,), 1.0 + count, "idle") for count in range(20)] + [((10,), 33.0, "scoring")]
    table = LineTable.fit(rows)
    whole = Line.fit([row[0] for row in rows], [row[1] for row in rows])
    assert table.beside("scoring")(10) == pytest.approx(33.0)
    assert table.beside("scoring")(20) / whole(20) == pytest.approx(33.0 / whole(10))
    assert table.beside("idle")(10) == pytest.approx(11.0)


def test_the_first_version_of_the_file_has_one_line_for_all_neighbours():
    line = {"constant": 1.0, "slopes": [2.0, 3.0]}
    raw = {"version": 1, "decode": line, "prefill": line, "score": line, "swap_in": 0.5}
    costs = MeasuredCost.from_dict({**raw, "migration": {"constant": 1.0, "slopes": [0.5]}})
    for neighbour in NEIGHBOURS:
        assert costs.beside(neighbour).decode_step_seconds(1, 1) == 6.0
    assert MeasuredCost.from_dict(costs.to_dict()) == costs
    assert "never observed" not in str(costs)
