"""Any layout's part of a parameter comes back, value by value, from what the ranks of any other layout own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.decisions.shards import tensor_segments
from rlhfuse.parallel.fragments import Place, assemble


def places(shape: tuple[int, ...], dim: int, joined: int, tp: int, cuts: list[int]) -> list[Place]:
    """Places of every tensor rank, and of every shard that `cuts` (shares of 1000) make of its part."""
    found = []
    for tp_rank in range(tp):
        whole = Place(shape, dim, tensor_segments(shape[dim], joined, tp_rank, tp), 0, 1)
        size = math.prod(whole.part_shape)
        edges = sorted({0, size, *(share * size // 1000 for share in cuts)})
        found += [Place(shape, dim, whole.segments, a, b) for a, b in zip(edges, edges[1:])]
    return found


def part(values: torch.Tensor, place: Place) -> torch.Tensor:
    """What a rank owns, straight from the definition."""
    pieces = [values.narrow(place.dim, a, b - a) for a, b in place.segments]
    return torch.cat(pieces, place.dim).flatten()[place.start : place.stop].clone()


layouts = st.tuples(
    st.integers(0, 1), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.lists(st.integers(0, 1000), max_size=3)
)


@examples(150)
@given(st.booleans(), st.integers(1, 3), st.integers(1, 2), layouts, layouts)
def test_a_part_of_any_layout_from_any_other(vector, rows, columns, saved, wanted):
    shape = (8 * rows,) if vector else (8 * rows, 8 * columns)
    values = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    stored, targets = (
        places(shape, 0 if vector else dim, joined, tp, cuts) for dim, joined, tp, cuts in (saved, wanted)
    )
    reads = [(one, lambda a, b, kept=part(values, one): kept[a:b]) for one in stored]
    for target in targets:
        assert torch.equal(assemble(target, reads, torch.float32), part(values, target))
        assert Place.from_list(target.to_list()) == target


def test_only_the_rows_that_are_needed_are_read():
    shape = (1000, 4)
    asked = []

    def read(start: int, stop: int) -> torch.Tensor:
        asked.append((start, stop))
        return torch.zeros(stop - start)

    stored = [(place, read) for place in places(shape, 0, 1, 1, [500])]
    assemble(Place(shape, 0, ((0, 1000),), 8, 21), stored, torch.float32)
    assert asked == [(8, 24)]


def test_what_is_missing_or_of_another_shape_is_said():
    whole = Place.whole((4, 2))
    half = (Place((4, 2), 0, ((0, 4),), 0, 5), lambda a, b: torch.zeros(b - a))
    with pytest.raises(ValueError, match="3 of 8 values are not there"):
        assemble(whole, [half], torch.float32)
    with pytest.raises(ValueError, match=r"shape \[4, 2\] is stored, \[4, 3\] is wanted"):
        assemble(Place.whole((4, 3)), [half], torch.float32)
    wrong = ([4, 2], 2, [0, 4], 8), ([4, 2], 0, [0, 5], 8), ([4, 2], 0, [0, 4], 9), ([4], 0, [0, 4], 0)
    for shape, dim, segment, stop in wrong:
        with pytest.raises(ValueError, match="no part of a parameter"):
            Place.from_list([shape, dim, [segment], 0, stop])
