"""No cut of whole layers has a faster slowest stage than the one that is found: held against all of them."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.forms.training import StageSeconds
from rlhfuse.planning.training.stage_cuts import fastest_cut


def all_cuts(layers: int, stages: int):
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in zip((0, *ends), (*ends, layers)))


def parameters(cut, places: int, layer: int, ends) -> int:
    """Those of the fullest rank."""
    stages = [count * layer + end for count, end in zip(cut, ends)]
    return max(sum(stages[place::places]) for place in range(places))


@st.composite
def pipelines(draw):
    """Layers, ranks, and whole numbers for what a layer and each stage's ends take and hold; they often tie."""
    places, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (2, 3), (3, 2)]))
    stages = places * chunks
    layers = draw(st.integers(stages, 12))
    small = st.integers(0, 12)
    ends = st.lists(st.tuples(small, small), min_size=stages, max_size=stages)
    seconds = StageSeconds((draw(small), draw(st.integers(1, 6))), tuple(draw(ends)))
    return layers, places, seconds, draw(st.integers(1, 6)), draw(st.lists(small, min_size=stages, max_size=stages))


@examples(200)
@given(pipelines())
def test_no_cut_is_faster_and_of_those_that_tie_none_is_leaner(made):
    layers, places, seconds, layer, ends = made
    found = fastest_cut(layers, places, seconds, layer, ends)
    cuts = list(all_cuts(layers, len(ends)))
    assert found in cuts

    def rank(cut) -> tuple:
        return max(seconds.of_ranks(cut, places)), parameters(cut, places, layer, ends)

    assert rank(found) == min(map(rank, cuts))
    counts = [sum(found[place::places]) for place in range(places)]
    alike = [cut for cut in cuts if [sum(cut[place::places]) for place in range(places)] == counts]
    assert max(map(sum, seconds.of(found))) == min(max(map(sum, seconds.of(cut))) for cut in alike)


@given(st.integers(1, 60), st.integers(1, 12))
def test_without_ends_the_cut_is_the_even_one(layers, stages):
    stages = min(layers, stages)
    seconds = StageSeconds((1.0, 2.0), ((0.0, 0.0),) * stages)
    assert fastest_cut(layers, stages, seconds, 7, [0] * stages) == ParallelLayout(1, 1, stages).even_cut(layers)


def test_the_stages_of_one_rank_share_its_layers():
    seconds = StageSeconds((1.0, 2.0), ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (2.0, 4.0)))
    chunked = fastest_cut(8, 2, seconds, 1, [0] * 4)
    assert sum(chunked[::2]) == 5 and sum(chunked[1::2]) == 3 and chunked[3] == 1  # the head's rank has fewer layers
