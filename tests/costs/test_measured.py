"""Measured costs: the fit, the file."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.sim_helpers import linear_cost, linear_file

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.profile_files import load_costs
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.costs.table import CostTable

PREFILL, PREFILL_TOKEN = 3e-3, 1e-4  # seconds, beside a decode step


def observe(costs: CostTable, noise: float, seed: int = 0):
    """What a job that runs at `costs` would measure."""
    generator = np.random.default_rng(seed)

    def jitter(seconds: float) -> float:
        return seconds * (1 + noise * float(generator.standard_normal()))

    steps, score, migration = [], [], []
    for _ in range(200):
        batch, context = int(generator.integers(1, 64)), int(generator.integers(50, 20_000))
        steps.append(StepObservation(batch, context, 0, jitter(costs.decode_step_seconds(batch, context))))
        tokens, sequences = int(generator.integers(10, 4000)), int(generator.integers(1, 32))
        beside = costs.decode_step_seconds(batch, context) + PREFILL + tokens * PREFILL_TOKEN
        steps.append(StepObservation(batch, context, tokens, jitter(beside)))
        score.append((tokens, sequences, jitter(costs.score_seconds(tokens, sequences))))
        volume = int(generator.integers(1, 10**8))
        migration.append((volume, jitter(costs.migration_seconds(volume))))
    return steps, score, migration, [jitter(costs.swap_in) for _ in range(9)]


def test_fit_recovers_the_costs_and_a_file_keeps_them(tmp_path):
    true = linear_cost()
    exact = MeasuredCost.fit(*observe(true, noise=0.0))
    decode = exact.decode
    assert decode.constant == pytest.approx(10e-3) and decode.slopes == pytest.approx((1e-3, 1e-6))
    prefill = exact.prefill  # of prompts, whose tokens are their context
    assert prefill.constant == pytest.approx(13e-3) and prefill.slopes == pytest.approx((101e-6, 1e-3))
    assert exact.migration.constant == pytest.approx(1e-3) and exact.swap_in == pytest.approx(0.5)
    noisy = MeasuredCost.fit(*observe(true, noise=0.05))
    assert "decode" in str(noisy) and "x batch" in str(noisy)
    write_json(tmp_path / "measured.json", noisy.to_dict())
    assert load_costs(tmp_path / "measured.json") == noisy
    for batch, context in ((1, 100), (16, 4000), (60, 15_000)):
        expected = true.decode_step_seconds(batch, context)
        assert noisy.table.decode_step_seconds(batch, context) == pytest.approx(expected, rel=0.1)


@examples(60)
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
        [StepObservation(4, 400, 0, 0.02), StepObservation(4, 100, 100, 0.01)],
        [(100, 4, 0.03)],
        [(1000, 0.001)],
        [0.2],
    )
    assert one.table.decode_step_seconds(4, 400) == pytest.approx(0.02)
    assert one.table.prefill_seconds(100, 4) == pytest.approx(0.01)
    with pytest.raises(InputError, match="no migration observation"):
        MeasuredCost.fit(*observe(linear_cost(), 0.0)[:2], [], [0.1])
    for kind in (False, True):
        steps, *rest = observe(linear_cost(), 0.0)
        with pytest.raises(InputError, match=f"no {('prefill', 'decode')[kind]} step to fit costs to"):
            MeasuredCost.fit([step for step in steps if (step.prefill_tokens > 0) is kind], *rest)
    with pytest.raises(InputError, match="seconds of a swap_in observation must be in"):
        MeasuredCost.fit(*observe(linear_cost(), 0.0)[:3], [float("nan")])


NAN, INF = float("nan"), float("inf")
UNBOUNDED = [
    (key, bad) for key in ("swap_in", "meeting", "release", "capture") for bad in (-1.0, 1e300, NAN, INF, 10**400)
]
GUESSES = {"guess_seconds": 0.0, "tokens": [1.5], "guesses": [1.0]}
NO_GUESSES = [{"guesses": [bad]} for bad in (NAN, 10**400, -1.0)] + [{"tokens": [1e300]}, {"guess_seconds": INF}]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 3}, "version 3 is unknown; this program reads 4"),
        ({"swap_in": "soon"}, "swap_in is .soon.; must be a valid number"),
        ({"decode": {"constant": 1.0, "slopes": [1.0]}}, "decode needs a constant and 2 slopes"),
        ({"score": {"constant": -1.0, "slopes": [1.0, 0.0]}}, r"constant and slopes must be in \[0, 1e\+09\], not -1"),
        ({"prefill": {}}, "prefill.constant is missing"),
        ({"prefill": 3}, "prefill must be a JSON object, not int"),
        ({"reward": {"seconds": -1.0}}, "reward: seconds of a reward call must be in .*, not -1"),
        *(({key: bad}, f"{key} must be in|not finite") for key, bad in UNBOUNDED),
        ({"reward": {"seconds": 1.0, "at_once": 10**400}}, "at_once"),
        ({"reward": {"seconds": 1.0, "at_once": 0}}, r"at_once must be in \[1, "),
        *(({"speculation": GUESSES | bad}, "must be in|not finite") for bad in NO_GUESSES),
    ],
)
def test_bad_cost_files_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        MeasuredCost.from_dict({**linear_file().to_dict(), **change}, "measured.json")
