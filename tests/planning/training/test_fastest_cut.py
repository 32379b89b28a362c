"""No cut of whole layers has a faster slowest stage than the one that is found: held against all of them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.hardware import known_hardware
from rlhfuse.planning.training.stage_cuts import EXACT_SECONDS, _deal, fastest_cut

LLAMA3_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
LLAMA3_70B = ModelSpec("llama", 80, 8192, 64, 8, 128, 28672, 128256, 8192)


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


def cost(spec: ModelSpec, layout: str, scalar: bool = False, **more) -> AnalyticCost:
    return AnalyticCost(spec, ParallelLayout.parse(layout), known_hardware()["h100"], 2, scalar, **more)


@pytest.mark.parametrize(
    "spec, layout, scalar, least, most",
    [
        (LLAMA3_70B, "d1t8p8", False, 0, 0.10),
        (LLAMA3_70B, "d1t8p8", True, 0, 0.10),
        (LLAMA3_8B, "d2t1p4", False, 0, 0.10),
        (LLAMA3_8B, "d1t1p8", False, 0.10, 0.20),  # whole layers are too coarse for 4.3 a stage
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_how_far_the_slowest_stage_is_above_the_mean(spec, layout, scalar, least, most, recompute):
    made = cost(spec, layout, scalar, recompute=recompute)
    seconds, pp = made.stage_seconds(MicrobatchTokens(8192, 4, 8192)), made.layout.pp
    found = fastest_cut(spec.layers, pp, seconds, spec.layer_parameters, made.memory.end_parameters())
    assert sum(found) == spec.layers
    ranks = seconds.of_ranks(found, pp)
    assert least - 1e-9 <= max(ranks) * pp / sum(ranks) - 1 <= most
    even = seconds.of_ranks(made.layout.even_cut(spec.layers), pp)
    assert max(ranks) <= max(even) and (spec is LLAMA3_70B or max(even) > 1.05 * max(ranks))
    if pp == 4:  # 4495 cuts, forward and backward of a micro-batch as the schedule's problem has them
        slowest = min(max(map(sum, seconds.of(cut))) for cut in all_cuts(spec.layers, pp))
        assert max(map(sum, seconds.of(found))) <= slowest + spec.layers * EXACT_SECONDS


def test_the_stages_of_one_rank_share_its_layers():
    seconds = StageSeconds((1.0, 2.0), ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (2.0, 4.0)))
    chunked = fastest_cut(8, 2, seconds, 1, [0] * 4)
    assert sum(chunked[::2]) == 5 and sum(chunked[1::2]) == 3 and chunked[3] == 1  # the head's rank has fewer layers


def dealt_one_by_one(layers, unit, fixed, least, most) -> list[int]:
    """What `_deal` says in words, all places looked at for every layer."""
    counts = list(least)
    for _ in range(layers - sum(least)):
        free = [place for place, count in enumerate(counts) if count < most[place]]
        counts[min(free, key=lambda place: ((counts[place] + 1) * unit + fixed[place], counts[place], place))] += 1
    return counts


@st.composite
def deals(draw):
    places = draw(st.integers(1, 8))
    rows = st.lists(st.integers(0, 5), min_size=places, max_size=places)
    least, more = draw(rows), draw(rows)
    layers = draw(st.integers(sum(least), sum(least) + sum(more)))
    return layers, draw(st.integers(0, 3)), draw(rows), least, [a + b for a, b in zip(least, more)]


@examples(300)
@given(deals())
def test_layers_are_dealt_as_one_by_one(deal):
    """Ties and places that are full included; layers may weigh nothing."""
    assert _deal(*deal) == dealt_one_by_one(*deal)
