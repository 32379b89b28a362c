"""Cuts: complete, balanced, never empty, the same everywhere; and refused with the arithmetic."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfuse.base.errors import InputError
from rlhfuse.decisions.balance import cut_microbatches, cut_minibatches, microbatch_sums, partition


def sums(weights, parts):
    return [sum(weights[i] for i in part) for part in parts]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(weights=st.lists(st.integers(0, 1000), max_size=40), parts=st.integers(1, 9))
def test_partition_is_complete_and_fills_every_part(weights, parts):
    lists = partition(weights, parts)
    assert len(lists) == parts
    assert sorted(itertools.chain(*lists)) == list(range(len(weights)))
    assert all(part == sorted(part) for part in lists)
    assert lists == partition(weights, parts)
    if len(weights) >= parts:
        assert all(lists)
    # differencing never ends more uneven than its heaviest weight
    assert max(sums(weights, lists)) - min(sums(weights, lists)) <= max(weights, default=0)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(weights=st.lists(st.integers(1, 50), min_size=2, max_size=8), parts=st.integers(2, 3))
def test_partition_is_near_the_optimum(weights, parts):
    """Differencing stays within 4/3 of the best maximum that brute force finds (far nearer in practice)."""
    best = min(
        max(sum(w for w, p in zip(weights, choice) if p == part) for part in range(parts))
        for choice in itertools.product(range(parts), repeat=len(weights))
    )
    assert max(sums(weights, partition(weights, parts))) <= 4 / 3 * best


def test_partition_known_case():
    """The textbook case: 8 7 6 5 4 differences to 2 over two parts (the best is 0)."""
    assert sorted(sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2))) == [14, 16]


def test_partition_balances_a_long_tail_better_than_taking_turns():
    weights = [2000, 900, 500, 300] + [100 + i for i in range(60)]
    lists = partition(weights, 4)
    in_turns = [list(range(part, 64, 4)) for part in range(4)]
    assert max(sums(weights, lists)) <= 1.02 * sum(weights) / 4
    assert max(sums(weights, in_turns)) - min(sums(weights, in_turns)) > 1000


def test_partition_refuses_negative_and_nan_weights():
    for weights, parts in (([1, -1], 1), ([float("nan")], 1), ([1], 0)):
        with pytest.raises(InputError, match="weights >= 0"):
            partition(weights, parts)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(count=st.integers(1, 200), minibatches=st.integers(1, 8), iteration=st.integers(0, 50))
def test_minibatches_are_a_seeded_permutation(count, minibatches, iteration):
    if count < minibatches:
        with pytest.raises(InputError, match=f"{count} samples cannot fill {minibatches} mini-batches"):
            cut_minibatches(count, minibatches, 1, iteration)
        return
    cut = cut_minibatches(count, minibatches, 1, iteration)
    assert sorted(itertools.chain(*cut)) == list(range(count))
    assert {len(part) for part in cut} <= {count // minibatches, -(-count // minibatches)}
    assert cut == cut_minibatches(count, minibatches, 1, iteration)


def test_minibatches_change_with_seed_and_iteration():
    cuts = [cut_minibatches(64, 4, seed, iteration) for seed in (0, 1, -1) for iteration in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(cuts, 2))


def test_microbatches_need_enough_samples():
    assert [len(part) for part in cut_microbatches([5, 5, 5, 5], 4)] == [1, 1, 1, 1]
    with pytest.raises(InputError, match="3 samples cannot fill 4 micro-batches"):
        cut_microbatches([5, 5, 5], 4)


def test_every_epoch_has_an_order_of_its_own():
    cuts = [cut_minibatches(64, 4, 1, iteration, epoch) for iteration in (0, 1) for epoch in (0, 1, 2)]
    assert all(a != b for a, b in itertools.combinations(cuts, 2))
    assert all(sorted(itertools.chain(*cut)) == list(range(64)) for cut in cuts)


def same_sums(weights, parts):
    made = microbatch_sums(np.array(weights, np.int64), parts).tolist()
    assert made == sums(weights, partition(weights, parts)), (weights, parts)
    return made


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    weights=st.integers(0, 3).flatmap(lambda scale: st.lists(st.integers(0, 10**scale), min_size=1, max_size=64)),
    data=st.data(),
)
def test_sums_are_those_of_the_partition_in_its_order(weights, data):
    """Few different weights tie often, and zeros are weights but no empty parts."""
    same_sums(weights, data.draw(st.integers(1, len(weights))))


@pytest.mark.parametrize("parts", [1, 16, 96, 256, 512])
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.2])
def test_sums_of_a_large_minibatch(parts, spread):
    drawn = np.random.default_rng(7).lognormal(6, spread, 512).astype(int)
    made = same_sums(np.minimum(drawn, 4096).tolist(), parts)
    assert len(made) == parts and sum(made) == np.minimum(drawn, 4096).sum()


def test_sums_refuse_what_the_cut_refuses():
    for weights, parts, words in (
        ([5, 5, 5], 4, "3 samples cannot fill 4"),
        ([1, -1], 1, "weights >= 0"),
        ([1], 0, "parts"),
    ):
        for cut in (cut_microbatches, lambda weights, parts: microbatch_sums(np.array(weights), parts)):
            with pytest.raises(InputError, match=words):
                cut(weights, parts)
