"""A sample's id says where it was drawn, and ids follow the order of their draws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.base.sample_ids import prompt_groups, sample_id, sample_origin


@examples(100)
@given(a=st.tuples(*[st.integers(0, 2**bits - 1) for bits in (24, 23, 16)]), b=st.tuples(*[st.integers(0, 3)] * 3))
def test_sample_ids_are_unique_and_ordered(a, b):
    assert 0 <= sample_id(*a) < 2**63
    assert sample_origin(sample_id(*a)) == a
    assert (sample_id(*a) < sample_id(*b)) == (a < b)
    assert (prompt_groups(sample_id(*a)) == prompt_groups(sample_id(*b))) == (a[:2] == b[:2])


@pytest.mark.parametrize("origin", [(2**24, 0, 0), (0, 2**23, 0), (0, 0, 2**16), (-1, 0, 0)])
def test_sample_id_refuses_what_does_not_fit(origin):
    with pytest.raises(InputError, match="is outside 0.."):
        sample_id(*origin)
