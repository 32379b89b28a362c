"""Micro-batches by tokens: whatever the lengths none has more, as few as fit, in numbers that a ladder has."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.decisions.balance import split_microbatches
from rlhfuse.decisions.microbatch_cut import MicrobatchCut

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


def test_a_ladder_of_many():
    assert MicrobatchCut.by_tokens(2048, 1, 96, 2048, least=8).rungs == (8, 10, 13, 17, 22, 28, 35, 44, 55, 69, 87, 96)
    assert MicrobatchCut.by_tokens(8192, 2, 96, 2048, multiple=3, least=4).rungs == (6, 9, 12)


def test_a_number_of_microbatches_is_kept_whatever_it_holds():
    cut = MicrobatchCut.by_samples(2, 2, 8, 10)
    assert (cut.rungs, cut.tokens) == ((2,), 20.0)
    assert cut.split([40, 1, 1, 1, 1, 1, 1, 1]) == split_microbatches([40, 1, 1, 1, 1, 1, 1, 1], 4)


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
