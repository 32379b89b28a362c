"""Rollouts: bytes are exact, packing aligns predictions with responses, cuts keep samples whole."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError, NotFiniteError
from rlhfuse.ppo.rollout import Rollout, RolloutBatch


def make_rollout(sample_id, prompt, response, scored=True):
    """Tokens are 1000 * sample + position, so that every token says where it belongs."""
    numbers = torch.arange(response, dtype=torch.float32) + 10 * sample_id
    rollout = Rollout(
        sample_id,
        tuple(1000 * sample_id + i for i in range(prompt)),
        tuple(1000 * sample_id + prompt + i for i in range(response)),
        numbers,
        ("stop", "length")[sample_id % 2],
    )
    return rollout.with_scores(numbers + 0.25, numbers + 0.5, 0.1 * sample_id) if scored else rollout


def make_batch(shapes, **kwargs):
    return RolloutBatch.from_rollouts([make_rollout(i, p, r, **kwargs) for i, (p, r) in enumerate(shapes)])


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=8)


@examples(50)
@given(
    sample_id=st.integers(0, 2**63 - 1),
    logprobs=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    reason=st.sampled_from(["stop", "length", "gelöscht"]),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_sent_bit_for_bit(sample_id, logprobs, reason, parts):
    array = torch.tensor(logprobs, dtype=torch.float32)
    rollout = Rollout(sample_id, (5, 2**31 - 1), tuple(range(len(array))), array, reason)
    scored = rollout.with_scores(array if parts[0] else None, -array if parts[1] else None, 0.1 if parts[2] else None)
    alone = rollout.with_scores(*pickle.loads(pickle.dumps(scored.scores_alone())))
    for back in (pickle.loads(pickle.dumps(scored)), Rollout.from_bytes(scored.to_bytes()), alone):
        for field in dataclasses.fields(Rollout):
            a, b = getattr(scored, field.name), getattr(back, field.name)
            same = a is b or (a.numpy().tobytes() == b.numpy().tobytes() if isinstance(a, torch.Tensor) else a == b)
            assert same, field.name


def test_rollout_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="sample 3: old_logprobs has shape"):
        Rollout(3, (1,), (2, 3), torch.zeros(1), "stop")
    with pytest.raises(InputError, match="at least one of each"):
        Rollout(3, (1,), (), torch.zeros(0), "stop")
    with pytest.raises(InputError, match="values has shape"):
        make_rollout(1, 2, 3).with_scores(values=torch.zeros(4))


def test_alignment_of_prediction_and_response():
    """Response token j at position P+j is predicted by position P+j-1."""
    batch = make_batch([(3, 2), (1, 3)])
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4, 1000, 1001, 1002, 1003]
    assert batch.cu_seqlens.tolist() == [0, 5, 9] and batch.cu_seqlens.dtype == torch.int32
    assert batch.response_index.tolist() == [3, 4, 6, 7, 8]
    assert batch.prediction_index.tolist() == [2, 3, 5, 6, 7]
    assert batch.response_lengths.tolist() == [2, 3] and batch.response_tokens == 5


def test_samples_that_do_not_count_keep_their_place():
    batch = make_batch([(3, 2), (1, 3), (2, 1)])
    assert batch.counted is None and batch.counted_tokens == 6 and batch.counted_lengths.tolist() == [2, 3, 1]
    batch = batch.with_fields(counted=torch.tensor([True, False, True, True, True, True]))
    some = batch.counting(torch.tensor([True, False, True]))
    assert some.counted.tolist() == [True, False, False, False, False, True]
    assert some.counted_tokens == 2 and some.counted_lengths.tolist() == [1, 0, 1] and len(some) == 3
    assert torch.equal(some.tokens, batch.tokens) and some.response_tokens == 6
    chosen = some.select([2, 0])
    assert chosen.counted.tolist() == [True, True, False] and chosen.counted_lengths.tolist() == [1, 1]


@examples(60)
@given(shapes=shapes, data=st.data())
def test_select_equals_packing_the_chosen_samples(shapes, data):
    batch = make_batch(shapes)
    chosen = data.draw(st.permutations(range(len(shapes))))[: data.draw(st.integers(1, len(shapes)))]
    cut, rollouts = batch.select(chosen), [make_rollout(sample, *shapes[sample]) for sample in chosen]
    assert cut.sample_ids.tolist() == chosen
    packed = [dataclasses.replace(rollout, sample_id=row) for row, rollout in enumerate(rollouts)]
    for name, wanted in vars(RolloutBatch.from_rollouts(packed).with_fields(sample_ids=cut.sample_ids)).items():
        found = getattr(cut, name)
        assert found is wanted is None or (found.dtype == wanted.dtype and torch.equal(found, wanted)), name


def test_packing_needs_sorted_and_complete_samples():
    with pytest.raises(InputError, match="sorted by sample id"):
        RolloutBatch.from_rollouts([make_rollout(2, 1, 1), make_rollout(1, 1, 1)])
    with pytest.raises(InputError, match="sorted by sample id"):
        RolloutBatch.from_rollouts([])
    with pytest.raises(InputError, match="sample 2 has no ref_logprobs"):
        RolloutBatch.from_rollouts([make_rollout(1, 1, 1), make_rollout(2, 1, 1, scored=False)])


def test_digest_sees_every_bit_of_what_was_generated():
    batch = make_batch([(3, 2), (1, 3)])
    assert batch.digest() == make_batch([(3, 2), (1, 3)]).digest()
    assert batch.digest() == batch.with_fields(values=batch.values + 1).digest()  # scores are not part of it
    flipped = batch.old_logprobs.clone()
    flipped[0] = -0.0  # was +0.0: equal as a number, another bit
    assert batch.digest() != batch.with_fields(old_logprobs=flipped).digest()
    assert batch.digest() != batch.with_fields(tokens=batch.tokens + 1).digest()
    assert batch.digest() != make_batch([(2, 3), (1, 3)]).digest()  # same tokens, other border


@pytest.mark.parametrize(
    "field, place, said",
    [
        ("scores", 1, "sample 1: a score is inf"),
        ("values", 2, "sample 1: a value of the critic is inf"),
        ("ref_logprobs", 1, "sample 0: a log-probability of the reference model is inf"),
    ],
)
def test_numbers_that_are_none_are_named_with_their_sample(field, place, said):
    batch = make_batch([(2, 2), (1, 3)], scored=True)
    batch.check_finite()
    numbers = getattr(batch, field).clone()
    numbers[place] = torch.inf
    with pytest.raises(NotFiniteError, match=said):
        batch.with_fields(**{field: numbers}).check_finite()
