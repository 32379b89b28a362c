"""Shapes of decode steps, their padding, and the one copy that carries their integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.draw_batches import draw_batch
from testkit.profiles import examples

from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.gpu.decode_graphs import DecodeInputs, DecodeShape, Staging, padded_arrays

CPU = torch.device("cpu")


def decode_batch(contexts: list[int], block_tokens: int) -> ForwardBatch:
    """One token of each sequence; the blocks of sequence s are 10 s, 10 s + 1, ..."""
    ends = np.array(contexts)
    blocks = -(-ends // block_tokens)
    tables = np.zeros((len(contexts), blocks.max()), np.int32)
    for s, count in enumerate(blocks):
        tables[s, :count] = 10 * s + np.arange(count)
    positions = ends - 1
    slots = tables[np.arange(len(ends)), positions // block_tokens].astype(np.int64) * block_tokens
    slots += positions % block_tokens
    rows = np.arange(len(ends))
    return ForwardBatch(rows + 100, positions, slots, np.arange(len(ends) + 1), ends, tables, rows)


@examples(100)
@given(st.integers(1, 600), st.integers(1, 600), st.sampled_from([1, 16, 256, 512]))
def test_a_shape_holds_its_batch_wastes_little_and_is_its_own_shape(sequences, context, block_tokens):
    most_rows, most_blocks = 600, -(-600 // block_tokens)
    blocks = -(-context // block_tokens)
    shape = DecodeShape.holding(sequences, blocks, most_rows, most_blocks, block_tokens)
    assert sequences <= shape.rows <= min(max(2 * sequences - 1, 1), sequences + 15, most_rows)
    assert blocks <= shape.width <= most_blocks
    assert shape.width * block_tokens <= max(2 * context, 256) + block_tokens
    assert DecodeShape.holding(shape.rows, shape.width, most_rows, most_blocks, block_tokens) == shape


def test_there_are_few_shapes():
    shapes = {DecodeShape.holding(s, b, 256, 256, 16) for s in range(1, 257) for b in range(1, 257)}
    assert len({shape.rows for shape in shapes}) == 20 and len({shape.width for shape in shapes}) == 5


@examples(100)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=9), st.sampled_from([4, 16]), st.integers(0, 5))
def test_padding_lies_in_the_spare_block_alone(contexts, block_tokens, more_rows):
    batch, spare = decode_batch(contexts, block_tokens), 1000
    shape = DecodeShape(len(contexts) + more_rows, batch.tables.shape[1] + 3)
    draws = draw_batch([{"top_p": 0.3, "banned": (i,)} for i in range(len(contexts))])
    packed = Staging(CPU).send(padded_arrays(batch, draws, shape, spare, block_tokens))
    assert packed.dtype == torch.int32 and packed.numel() == shape.integers
    inputs = DecodeInputs(shape, packed)
    tokens, positions, slots = inputs.indices()
    real = len(contexts)
    assert tokens.dtype == positions.dtype == slots.dtype == torch.int64
    for found, wanted in ((tokens, batch.tokens), (positions, batch.positions), (slots, batch.slots)):
        assert np.array_equal(found[:real], wanted)
    assert np.array_equal(inputs.contexts[:real], batch.contexts)
    assert np.array_equal(inputs.tables[:real, : batch.tables.shape[1]], batch.tables)
    assert (slots[real:] // block_tokens == spare).all() and (slots[:real] // block_tokens != spare).all()
    assert (inputs.tables[real:] == spare).all() and (inputs.contexts[real:] == 1).all()
    assert not tokens[real:].any() and not positions[real:].any()
    places, found = inputs.draws.unpack()
    assert places.tolist() == list(range(real)), "padding draws nothing"
    for name, wanted in vars(draws).items():
        assert wanted is getattr(found, name) is None or np.array_equal(getattr(found, name), wanted), name


def test_a_batch_with_a_chunk_is_no_decode_step():
    batch = decode_batch([3, 5], 4)
    chunk = ForwardBatch(**{**vars(batch), "tokens": np.arange(5), "query_starts": np.array([0, 3, 5])})
    with pytest.raises(AssertionError, match=r"\[3 2\] tokens do not fit"):
        padded_arrays(chunk, draw_batch([{}] * 2), DecodeShape(8, 4), 9, 4)


def test_staging_carries_any_arrays_into_new_or_given_memory():
    staging = Staging(CPU)
    first = staging.send([np.arange(6).reshape(2, 3), np.array([7], np.int32)])
    target = torch.zeros(9, dtype=torch.int32)
    assert staging.send([np.arange(9) * 2], target) is target
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 7], "a later send must not reach into what was sent"
    assert target.tolist() == list(range(0, 18, 2))
