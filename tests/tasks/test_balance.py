"""Cuts: complete, balanced, sorted, never empty; dealt evenly; and refused with the arithmetic."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.balance import deal, split_microbatches, split_minibatches


def sums(weights, parts):
    return [sum(weights[i] for i in part) for part in parts]


@examples(150)
@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=40), parts=st.integers(1, 9))
def test_microbatches_are_complete_filled_and_sorted(lengths, parts):
    if len(lengths) < parts:
        with pytest.raises(InputError, match=f"{len(lengths)} samples cannot fill {parts} micro-batches"):
            split_microbatches(lengths, parts)
        return
    made = split_microbatches(lengths, parts)
    assert len(made) == parts and all(made)
    assert sorted(itertools.chain(*made)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in made)
    weights = sums(lengths, made)
    assert weights == sorted(weights, reverse=True)
    assert weights[0] - weights[-1] <= max(lengths)


@examples(40)
@given(lengths=st.lists(st.integers(1, 50), min_size=3, max_size=8), parts=st.integers(2, 3))
def test_the_heaviest_is_near_the_optimum(lengths, parts):
    """Longest first stays within 4/3 - 1/(3 parts) of the best maximum (Graham 1969), which brute force finds."""
    best = min(
        max(sum(w for w, p in zip(lengths, choice) if p == part) for part in range(parts))
        for choice in itertools.product(range(parts), repeat=len(lengths))
    )
    assert sums(lengths, split_microbatches(lengths, parts))[0] <= (4 / 3 - 1 / (3 * parts)) * best


@examples(60)
@given(
    longest=st.integers(1, 30),
    budget=st.integers(1, 4),
    data=st.data(),
    count=st.integers(1, 30),
    parts=st.integers(1, 9),
)
def test_as_many_parts_as_full_samples_need_are_enough_for_any(longest, budget, data, count, parts):
    """What `BatchArithmetic` takes as the most micro-batches: `budget` of the longest samples in each."""
    count = min(count, budget * parts)
    if count < parts:
        return
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=count, max_size=count))
    assert sums(lengths, split_microbatches(lengths, parts))[0] <= budget * longest


def test_a_known_case():
    """8 7 6 5 4 over two: 8 + 5 + 4 and 7 + 6 (the best is 15 and 15)."""
    assert split_microbatches([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]


@examples(60)
@given(weights=st.lists(st.integers(0, 100), min_size=1, max_size=8), pipelines=st.integers(1, 5))
def test_every_pipeline_is_dealt_as_many_and_nearly_as_much(weights, pipelines):
    parts = sorted((weight for weight in weights for _ in range(pipelines)), reverse=True)
    parts = [part + len(parts) - place for place, part in enumerate(parts)]  # no two are alike
    dealt = [deal(parts, pipelines, k) for k in range(pipelines)]
    assert sorted(itertools.chain(*dealt), reverse=True) == parts
    assert {len(own) for own in dealt} == {len(weights)}
    assert all(own == sorted(own, reverse=True) for own in dealt)
    assert max(map(sum, dealt)) - min(map(sum, dealt)) <= parts[0] - parts[-1]


def test_parts_are_dealt_back_and_forth():
    assert [deal("abcdef", 3, pipeline) for pipeline in range(3)] == [["a", "f"], ["b", "e"], ["c", "d"]]
    assert deal("abcdef", 1, 0) == list("abcdef")


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


def test_no_cut_takes_lengths_below_zero():
    for lengths, parts in (([1, -1], 1), ([1], 0), ([float("nan")], 1)):
        with pytest.raises(InputError, match="weights >= 0"):
            split_microbatches(lengths, parts)
