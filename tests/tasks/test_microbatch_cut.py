"""Micro-batches by tokens: whatever the lengths none has more, as few as fit, in numbers that a ladder has."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.balance import split_microbatches
from rlhfuse.tasks.microbatch_cut import MicrobatchCut

SIZES = dict(
    pipelines=st.integers(1, 4),
    samples=st.integers(1, 48),
    longest=st.integers(1, 60),
    times=st.sampled_from([1, 1.5, 2, 3, 4, 100]),
    multiple=st.integers(1, 4),
    least=st.integers(1, 8),
)


def cut_of(pipelines, samples, longest, times, multiple, least) -> MicrobatchCut:
    try:
        return MicrobatchCut.by_tokens(int(times * longest), pipelines, samples, longest, multiple, least)
    except InputError:
        assume(False)
        raise


@examples(200)
@given(data=st.data(), **SIZES)
def test_any_samples_are_cut_within_the_tokens(data, pipelines, samples, longest, times, multiple, least):
    cut = cut_of(pipelines, samples, longest, times, multiple, least)
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=samples, max_size=samples))
    parts = cut.split(lengths)
    assert sorted(itertools.chain(*parts)) == list(range(samples)) and all(parts)
    assert max(sum(lengths[sample] for sample in part) for part in parts) <= cut.tokens
    rung = cut.rung_of(parts)
    assert rung in cut.rungs and len(parts) == pipelines * rung
    for fewer in cut.rungs[: cut.rungs.index(rung)]:
        heaviest = split_microbatches(lengths, pipelines * fewer)[0]
        assert sum(lengths[sample] for sample in heaviest) > cut.tokens, "a lower rung would have done"


@examples(200)
@given(**SIZES)
def test_full_samples_fit_on_the_last_rung_and_not_before(pipelines, samples, longest, times, multiple, least):
    cut = cut_of(pipelines, samples, longest, times, multiple, least)
    assert cut.rung_of(cut.split([longest] * samples)) == cut.rungs[-1]
    assert all(rung % multiple == 0 for rung in cut.rungs)
    assert list(cut.rungs) == sorted(set(cut.rungs))
    assert pipelines * cut.rungs[-1] <= samples
    assert cut.rungs[0] >= min(least, cut.rungs[-1])
    for low, high in itertools.pairwise(cut.rungs):
        assert high <= max(low + multiple, 1.25 * low + multiple), "a step is a quarter"


@examples(300)
@given(data=st.data(), by_samples=st.booleans(), **SIZES)
def test_spared_samples_are_in_none_and_decide_nothing_for_the_others(
    data, by_samples, pipelines, samples, longest, times, multiple, least
):
    cut = cut_of(pipelines, samples, longest, times, multiple, least)
    if by_samples:
        cut = MicrobatchCut.by_samples(cut.rungs[0], pipelines, samples, longest)
    some_length = st.integers(1, longest)
    lengths = data.draw(st.lists(some_length, min_size=samples, max_size=samples))
    spared = data.draw(st.frozensets(st.integers(0, samples - 1)))
    others = [data.draw(some_length) if sample in spared else tokens for sample, tokens in enumerate(lengths)]
    parts, again = cut.split(lengths, spared), cut.split(others, spared)
    assert len(parts) == len(again) == pipelines * cut.rung_of(parts) and cut.rung_of(parts) in cut.rungs
    placed = list(itertools.chain(*parts))
    assert len(set(placed)) == len(placed) and set(placed) | spared == set(range(samples)) and all(parts)
    filling = spared & set(placed)
    own = [part for part in parts if not filling.intersection(part)]
    assert parts[: len(own)] == own == again[: len(own)], "the others' first, the same whatever the spared ones are"
    assert all(filling.issuperset(part) for part in parts[len(own) :]), "none has both"
    if filling:
        assert len(filling) == len(parts) - (samples - len(spared)) and all(len(part) == 1 for part in parts)
        left_out = [lengths[sample] for sample in spared - filling]
        assert max(lengths[sample] for sample in filling) <= min(left_out, default=longest)
    if not by_samples:
        assert max(sum(lengths[sample] for sample in part) for part in parts) <= cut.tokens
    assert cut.split(lengths, frozenset()) == cut.split(lengths)


def test_a_minibatch_with_hardly_any_gradient_fills_the_lowest_rung():
    """One of eight samples has a gradient: the three shortest others fill the micro-batches that would be empty."""
    cut, lengths = MicrobatchCut.by_tokens(20, 2, 8, 10, least=2), [10, 9, 8, 7, 6, 5, 4, 3]
    assert cut.rungs == (2,) and cut.split(lengths, frozenset(range(8)) - {4}) == [[4], [5], [6], [7]]
    assert cut.split(lengths, frozenset(range(8))) == [[4], [5], [6], [7]]
    assert cut.split(lengths, frozenset((0, 2))) == split_microbatches(lengths, 4, {0, 2}) == [[1], [4, 7], [5, 6], [3]]


def test_a_ladder_of_many():
    assert MicrobatchCut.by_tokens(2048, 1, 96, 2048, least=8).rungs == (8, 10, 13, 17, 22, 28, 35, 44, 55, 69, 87, 96)
    assert MicrobatchCut.by_tokens(8192, 2, 96, 2048, multiple=3, least=4).rungs == (6, 9, 12)


@pytest.mark.parametrize(
    "sizes, told",
    [
        ((511, 1, 8, 512), "fusion.microbatch_tokens=511: a sample may have 512 tokens; use at least as many"),
        ((512, 4, 3, 512), "a mini-batch of 3 samples cannot fill 4 pipelines x a multiple of 1 micro-batches; lower"),
        ((512, 2, 9, 512, 3), "9 samples of 512 tokens do not fit one by one into 2 pipelines x a multiple of 3"),
        ((512, 2, 9, 512, 3), "micro-batches; use at least 1024"),
    ],
)
def test_what_cannot_be_says_what_would_do(sizes, told):
    with pytest.raises(InputError) as error:
        MicrobatchCut.by_tokens(*sizes)
    assert told in str(error.value)


@examples(100)
@given(pipelines=st.integers(1, 4), samples=st.integers(1, 40), multiple=st.integers(1, 4))
def test_the_tokens_that_a_refusal_names_are_enough(pipelines, samples, multiple):
    with pytest.raises(InputError) as error:
        MicrobatchCut.by_tokens(7, pipelines, samples, 7, multiple)
        assume(False)
    words = str(error.value).split()
    if words[-1].isdigit():
        MicrobatchCut.by_tokens(int(words[-1]), pipelines, samples, 7, multiple)
