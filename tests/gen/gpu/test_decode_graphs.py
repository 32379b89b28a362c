"""Shapes of decode steps, their padding, the one copy that carries their integers; and the order of calls by which a
CUDA graph is captured, over doubles of torch.cuda's objects."""

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.gen.gpu.decode_graphs import DecodeShape


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
