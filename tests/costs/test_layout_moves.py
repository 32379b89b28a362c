"""Prices of weight moves: sums of the rows of the plan that runs, whoever tells who holds what."""

import random

import pytest
from testkit.profiles import share
from testkit.weight_shards import holders_of, model_shards

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.layout_moves import ACROSS, STAYS, WITHIN, MoveLoad, layout_moves, model_load
from rlhfuse.decisions.layouts import Task, training_layouts
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.decisions.weight_moves import plan_moves
from rlhfuse.schedule.ir.ranks import FusedRanks, plain_cells, rank_map
from rlhfuse.tasks.task import TASKS

MACHINE = hardware_by_name("a100")
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


def test_what_the_seconds_are_made_of():
    """One rank of a node needs what the other node has, and gives it on; by hand."""
    spec, source, target = SPECS[0], ParallelLayout(1, 1, 1), ParallelLayout(4, 1, 1)
    load = model_load(spec, source, (((0,),),), target, 4, 2)
    whole = 4 * spec.parameters() + 4 * 2 * (spec.padded_vocab - spec.vocab) * spec.hidden
    assert (
        load.bytes[STAYS].tolist() == [[whole, 0, 0, 0]] * 2
        and load.host_copy_seconds(MACHINE) == whole / MACHINE.host_bandwidth
    )
    assert load.bytes[WITHIN].sum(axis=1).tolist() == [2 * whole] * 2
    assert load.bytes[ACROSS, 0].tolist() == [whole, 0, 0, 0] and load.minimum_across == whole
    rates = MACHINE.memory_bandwidth / 2, MACHINE.node_link_bandwidth, MACHINE.cross_link_bandwidth
    assert load.seconds(MACHINE) == pytest.approx(sum(whole / rate for rate in rates))


def test_moves_of_a_run():
    """Two nodes of eight: the actor's only pipeline spans both, so each node must get the other's half of it once."""
    layouts = {"actor_train": "d1t2p8", "critic_train": "d4t2p2", "generation": "d8t2p1", "critic_inference": "d8t2p1"}
    tasks = tuple(Task(name, TASKS[name].role, ParallelLayout.parse(text), (0, 15)) for name, text in layouts.items())
    ranks = rank_map(training_layouts(tasks))
    spec = ModelSpec("qwen2", 9, 16, 8, 8, 4, 24, 100, 64, qkv_bias=True)
    actor, critic = layout_moves(tasks, ranks, {"actor": spec, "critic": spec}, 4, MACHINE)
    assert actor.traffic.across == actor.traffic.minimum_across
    whole = sum(s.bytes for s in model_shards(spec, ParallelLayout(1, 1, 1), (((0,),),), 4))
    assert actor.traffic.across == whole  # half of it to each node; norms too, which both tensor ranks hold, once
    assert critic.traffic.across == 0 and 0 < critic.seconds < 1
    wanted = ParallelLayout.parse("d8t2p1")
    load = check(spec, ParallelLayout.parse("d4t2p2"), ranks.pipelines("critic"), wanted, 8, True, 4)
    assert critic.seconds == load.seconds(MACHINE) + load.host_copy_seconds(MACHINE)  # it goes on to host memory
    alone = layout_moves(tuple(t for t in tasks if t.role == "actor"), ranks, {"actor": spec}, 4, MACHINE)
    assert [move.model for move in alone] == ["actor"]
