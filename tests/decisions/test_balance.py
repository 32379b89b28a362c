"""Cuts: complete, balanced, never empty, the same everywhere; and refused with the arithmetic."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.decisions.balance import microbatch_sums, partition, split_microbatches, split_minibatches


def sums(weights, parts):
    return [sum(weights[i] for i in part) for part in parts]


@examples(150)
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


@examples(40)
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


@examples(50)
@example(count=3, minibatches=4, iteration=0)
@given(count=st.integers(1, 200), minibatches=st.integers(1, 8), iteration=st.integers(0, 50))
def test_minibatches_are_a_seeded_permutation(count, minibatches, iteration):
    if count < minibatches:
        with pytest.raises(InputError, match=f"{count} samples cannot fill {minibatches} mini-batches"):
            split_minibatches(count, minibatches, 1, iteration)
        return
    cut = split_minibatches(count, minibatches, 1, iteration)
    assert sorted(itertools.chain(*cut)) == list(range(count))
    assert {len(part) for part in cut} <= {count // minibatches, -(-count // minibatches)}
    assert cut == split_minibatches(count, minibatches, 1, iteration)


def test_every_seed_iteration_and_epoch_has_an_order_of_its_own():
    draws = itertools.product((0, 1, -1), (0, 1), (0, 1, 2))
    cuts = [split_minibatches(64, 4, seed, iteration, epoch) for seed, iteration, epoch in draws]
    assert all(a != b for a, b in itertools.combinations(cuts, 2))
    assert all(sorted(itertools.chain(*cut)) == list(range(64)) for cut in cuts)


@pytest.mark.parametrize("spread, parts", [*itertools.product([0.0, 0.3, 1.2], [1, 16, 96, 512])])
def test_sums_of_a_large_minibatch_are_those_of_its_lists(spread, parts):
    drawn = np.random.default_rng(7).lognormal(6, spread, 512).astype(int)
    lengths = np.minimum(drawn, 4096)
    tokens = lengths.tolist()
    assert microbatch_sums(lengths, parts).tolist() == sums(tokens, split_microbatches(tokens, parts))


def test_no_cut_takes_too_few_samples_or_weights_below_zero():
    assert [len(part) for part in split_microbatches([5, 5, 5, 5], 4)] == [1, 1, 1, 1]
    refused = ([5, 5, 5], 4, "3 samples cannot fill 4"), ([1, -1], 1, "weights >= 0"), ([1], 0, "parts")
    for weights, parts, words in (*refused, ([float("nan")], 1, "weights >= 0")):
        for cut in (split_microbatches, lambda weights, parts: microbatch_sums(np.array(weights), parts)):
            with pytest.raises(InputError, match=words):
                cut(weights, parts)
    for weights, parts, _ in refused[1:]:
        with pytest.raises(InputError, match="weights >= 0"):
            partition(weights, parts)
