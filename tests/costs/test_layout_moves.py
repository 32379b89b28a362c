"""Prices of weight moves: sums of the rows of the plan that runs, whoever tells who holds what."""

import random

import pytest
from testkit.profiles import share
from testkit.weight_shards import holders_of, model_shards

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.layout_moves import MoveLoad
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.decisions.weight_moves import plan_moves
from rlhfuse.schedule.ir.ranks import FusedRanks, plain_cells, rank_map

SPECS = (
    ModelSpec("qwen2", 16, 16, 8, 8, 4, 24, 100, 64, qkv_bias=True),
    ModelSpec("qwen3", 17, 32, 16, 8, 4, 40, 300, 64, tied_embeddings=True, qk_norm=True),
    ModelSpec("llama", 19, 64, 8, 8, 8, 192, 512, 64, proj_bias=True),
)


def check(spec, layout, cells, target, node: int, head: bool, element_bytes: int = 2) -> MoveLoad:
    """The load; its plan is the same, row by row, whether holders are told by the layouts or by every shard."""
    sides = (layout, cells), (target, plain_cells(target))
    told = [WeightHolders.of_layout(spec, *side, element_bytes, head) for side in sides]
    named = [holders_of(model_shards(spec, *side, element_bytes, head)) for side in sides]
    made = plan_moves(*told, node)
    assert list(made) == list(plan_moves(*named, node))
    return MoveLoad.of(made, node)


def drawn_layout(draw: random.Random, world: int, layers: int) -> ParallelLayout:
    tp = draw.choice([t for t in (1, 2, 4, 8) if world % t == 0])
    pp = draw.choice([p for p in range(1, 9) if world // tp % p == 0])
    chunks = draw.choice([v for v in (1, 1, 2) if pp * v <= layers]) if pp > 1 else 1
    made = ParallelLayout.parse(f"d{world // tp // pp}t{tp}p{pp}" + (f"v{chunks}" if chunks > 1 else ""))
    if draw.random() < 0.3:
        borders = sorted(draw.sample(range(1, layers), made.stages - 1))
        made = made.with_cut(tuple(b - a for a, b in zip((0, *borders), (*borders, layers))))
    return made


def drawn_ranks(draw: random.Random, world: int, layers: int) -> FusedRanks:
    """Two layouts that can train together: the second one's pipelines run backwards, stages may be merged."""
    while True:
        pair = {model: drawn_layout(draw, world, layers) for model in ("actor", "critic")}
        try:
            return rank_map(pair)
        except InputError:
            continue


def test_loads_are_those_of_the_plan():
    draw, merged, interleaved, crossing = random.Random(2), 0, 0, 0
    for _ in range(share(104)):
        world, spec = draw.choice([1, 2, 4, 6, 8, 12, 16, 16, 24, 32, 40, 64]), draw.choice(SPECS)
        ranks, node = drawn_ranks(draw, world, spec.layers), draw.choice([2, 4, 8, 8, 8])
        tp = draw.choice([t for t in (1, 2, 4, 8) if world % t == 0])
        for model in ("actor", "critic"):
            own = ranks.shape.share(model)
            target = ParallelLayout(world // tp, tp, 1)
            load = check(spec, own.layout, ranks.pipelines(model), target, node, model == "critic")
            merged, interleaved = merged + (own.merge > 1), interleaved + (own.layout.chunks > 1)
            crossing += load.traffic.across > 0
    assert merged and interleaved and crossing, "the draw is too easy"


@pytest.mark.parametrize(
    "source, target", [("d2t2p4@8-23", "d4t4p1@0-15"), ("d16t1p1", "d2t2p4v2"), ("d1t8p1", "d8t1p1")]
)
def test_other_ranks_and_targets_in_pipelines(source, target):
    source, target = ParallelLayout.parse(source), ParallelLayout.parse(target)
    check(SPECS[0], source, plain_cells(source), target, 8, False)
