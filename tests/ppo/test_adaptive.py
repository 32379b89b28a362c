"""The KL's coefficient, and the running spread of scores against statistics over all of them at once."""

import json
import math
import statistics
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.ppo.adaptive import KLController, RunningMoments

BATCHES = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), min_size=1, max_size=5)


def after(batches, spread=RunningMoments()):
    for batch in batches:
        spread = spread.after(torch.tensor(batch, dtype=torch.float32))
    return spread


@examples(60)
@given(batches=BATCHES, offset=st.sampled_from([0.0, 1e4]))
def test_batches_one_after_the_other_are_all_at_once(batches, offset):
    batches = [[float(torch.tensor(x + offset)) for x in batch] for batch in batches]
    scores = [x for batch in batches for x in batch]
    spread = after(batches)
    assert spread.count == len(scores)
    if scores:
        assert spread.mean == pytest.approx(statistics.fmean(scores), rel=1e-12, abs=1e-12)
        expected = statistics.pstdev(scores)
        assert spread.std == pytest.approx(expected, rel=1e-6, abs=1e-9) or expected < 1e-5


def test_equal_scores_are_not_divided():
    assert RunningMoments().std == after([[]]).std == after([[3.0]]).std == after([[3.0, 3.0], [3.0]]).std == 1.0


def test_a_checkpoint_keeps_every_bit():
    before = after([[0.1, 0.7], [1 / 3]])
    restored = RunningMoments(**json.loads(json.dumps(asdict(before))))
    assert restored == before and after([[0.2, 5.0]], restored) == after([[0.2, 5.0]], before)


def test_the_coefficient_follows_the_kl():
    control = KLController(0.1, target=6.0, horizon=1000)
    assert control.after(6.0, 64).coef == 0.1
    assert control.after(6.6, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert control.after(600.0, 100).coef == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))  # no further at once
    assert control.after(0.0, 100).coef == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))
    assert control.after(0.0, 10**6).coef == 0.05  # of a large batch: halved at most
    assert KLController(0.1).after(600.0, 64) == KLController(0.1)
    assert control.after(math.nan, 0) == control, "all samples failed"
    for _ in range(5000):
        control = control.after(-1.0, 10**6)
    assert control.coef == 1e-6 < control.after(600.0, 10**6).coef  # it can come back
    assert KLController(1e-9, target=6.0).after(0.0, 100).coef == 1e-9  # one that begins lower stays
