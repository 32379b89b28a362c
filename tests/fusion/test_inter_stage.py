"""Generation with inference: the same bits for every R_t, whoever finishes first, migrated or not."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest
import torch
from tiny import write_checkpoint

from rlhfuse.fusion.inference import pack_by_tokens
from rlhfuse.fusion.inter_stage import FusionLimits, Request, transfer_order
from rlhfuse.gen.sequence import SamplingParams
from rlhfuse.simulator.migration import MigrationPlan, Move, MoveCost
from rlhfuse.spec import ModelSpec

BY_KV = MoveCost(1, 0.0, 0.0, 1.0, 1.0)
BY_TOKENS = MoveCost(1, 1.0, 1.0, 0.0, 0.0)
LENGTHS = {
    "long tail": [3, 5, 2, 4, 6, 3, 60, 4, 5, 2, 3, 7, 4, 44, 3, 5],
    "one instance works alone": [2] * 12 + [40] * 4,
    "all the same": [20] * 16,
    "one sample": [30],
    "two very long": [3, 5, 2, 4, 6, 3, 220, 4, 5, 2, 3, 7, 4, 180, 3, 5],
    "one very long": [3, 5, 2, 4, 6, 3, 2, 4, 5, 2, 3, 7, 4, 44, 3, 220],
    "two samples on four instances": [12, 31],
}


def requests_of(lengths: list[int], one_prompt: bool) -> list[Request]:
    return [
        Request(
            1000 + i,
            tuple(range(3, 23 if one_prompt else 6 + i % 4)),
            SamplingParams(max_tokens=n, seed=7, ignore_eos=True),
        )
        for i, n in enumerate(lengths)
    ]


def limits(move_cost: MoveCost) -> FusionLimits:
    return FusionLimits(
        bs_max=8, sample_kv_bytes=100.0, capacity_kv_bytes=1000.0, block_tokens=8, move_cost=move_cost, score_tokens=64
    )


def generate_and_score(
    rank, folders, layout, inference, lengths, threshold, by, number, blocks=80, bucket_bytes=64 << 20,
    one_prompt=False, step_seconds=0.0,
) -> dict:
    """One iteration on this rank; returns the digest of everything that came out, and what happened.

    With `step_seconds` a decode step takes at least so long and all ranks begin together, so that a rank that the
    machine keeps waiting for a moment has not missed the trigger when it comes back.
    """  # fmt: skip
    import time

    import torch.distributed as dist

    from rlhfuse.fusion.inference import FrozenModel, Scorer
    from rlhfuse.fusion.inter_stage import InterStage
    from rlhfuse.fusion.placement import Placement
    from rlhfuse.gen.engine import Engine, EngineOptions
    from rlhfuse.models.build import build_model
    from rlhfuse.models.stage import PipelineStage
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, plain_grid
    from rlhfuse.parallel.offload import ParkedWeights
    from rlhfuse.roles import load_part
    from rlhfuse.spec import ParallelLayout

    device = choose_device("cpu", 0, 1)
    maker = GroupMaker(60)
    grids = {task: plain_grid(ParallelLayout.parse(text)) for task, text in (("g", layout), ("i", inference))}
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}

    def build(role: str, task: str, head: bool):
        groups = maker.for_model(f"{role}{task}", grids[task], rank)
        model = build_model(
            specs[role], grids[task], groups, rank, scalar_head=head, dtype=torch.float32, device=device
        )
        load_part(model, folders[role], specs[role], grids[task], rank, head)
        return model.requires_grad_(False), groups.tp

    def frozen(role: str) -> FrozenModel:
        model, group = build(role, "i", role != "reference")
        parked = ParkedWeights(model, device)
        parked.park()
        return FrozenModel(PipelineStage(model, first=True, last=True, scalar_head=role != "reference"), parked, group)

    actor, tp_group = build("actor", "g", False)
    engine = Engine(
        specs["actor"],
        dict(actor.named_parameters()),
        EngineOptions(num_blocks=blocks, block_tokens=8),
        tp_group=tp_group if dist.get_world_size(tp_group) > 1 else None,
    )
    reference, critic, reward = frozen("reference"), frozen("critic"), frozen("reward")
    scorer = Scorer(reference, critic, reward, vocab=200, temperature=1.0, device=device.torch_device)
    placement = Placement(tuple(s[0] for s in grids["g"].cells), tuple(s[0] for s in grids["i"].cells))
    store = dist.PrefixStore(f"test{number}", dist.distributed_c10d._get_default_store())
    stage = InterStage(
        rank, placement, engine, scorer, store, instance_group=tp_group, worker_group=reference.tp_group,
        timeout_seconds=30, progress=lambda _: None, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    if step_seconds:
        step = engine.step
        engine.step = lambda: (time.sleep(step_seconds), step())[1]
        dist.barrier()
    report = stage.run(0, requests_of(lengths, one_prompt), (threshold,) if threshold else (), limits(BY_KV if by == "kv" else BY_TOKENS))
    sha = hashlib.sha256(b"".join(rollout.to_bytes() for rollout in report.rollouts)).hexdigest()
    assert engine.kv_bytes == 0 and not reference.parked.loaded
    maker.close()
    return {
        "digest": sha, "count": len(report.rollouts), "migrated": report.migrated_samples,
        "bytes": report.migrated_bytes, "recomputed": report.recomputed_samples,
        "block_bytes": specs["actor"].kv_bytes_per_token(4) * 8,
        "early": report.scored_before_generation_end, "lengths": [len(r.response_tokens) for r in report.rollouts],
        "plan": str(report.plans[0]) if report.plans else None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    actor = write_checkpoint(base / "actor", seed=1)
    reward = write_checkpoint(base / "reward", scalar_head=True, seed=2)
    return {"actor": actor, "reference": write_checkpoint(base / "ref", seed=4), "critic": reward, "reward": reward}


@pytest.fixture(scope="module")
def run(workers, folders):
    numbers = iter(range(10_000))

    def call(lengths, threshold, by="kv", layout="d4t1p1", inference="d4t1p1", **more):
        one = partial(generate_and_score, **more)
        return workers.run(one, folders, layout, inference, LENGTHS[lengths], threshold, by, next(numbers))

    return call


@pytest.mark.parametrize("lengths", [name for name in LENGTHS if name != "two very long"])
def test_every_threshold_gives_the_bits_of_the_serial_run(run, lengths):
    count = len(LENGTHS[lengths])
    serial = run(lengths, 0)
    assert serial[0]["lengths"] == LENGTHS[lengths] and serial[0]["migrated"] == 0 and serial[0]["plan"] is None
    for threshold in sorted({1, count // 2, count}):
        for by in ("kv", "tokens"):
            fused = run(lengths, threshold, by)
            assert {one["digest"] for one in fused} == {serial[0]["digest"]}, (threshold, by)
            assert len({one["plan"] for one in fused}) == 1


def test_the_long_tail_moves_with_its_cache_and_others_score_meanwhile(run):
    fused = run("one instance works alone", 3)[0]  # instance 3 keeps its four samples: nothing has to move
    assert fused["migrated"] == 0
    fused = run("one very long", 2)[0]
    assert fused["bytes"] > 0 or fused["migrated"] == 0  # both may happen to sit on one instance by then
    assert fused["recomputed"] == 0
    assert fused["early"] >= 1  # 220 steps are time enough to score a pack, however busy the machine is
    fused = run("two very long", 2, step_seconds=0.005)[0]
    assert fused["migrated"] >= 1 and fused["bytes"] > 0 and fused["recomputed"] == 0
    moved = run("two very long", 2, "tokens", step_seconds=0.005)[0]
    assert moved["recomputed"] == moved["migrated"] >= 1 and moved["bytes"] == 0


def test_a_destination_without_room_loses_nothing(run):
    serial = run("long tail", 0)
    fused = run("long tail", 16, blocks=9)  # one sequence at full length needs all but one of the blocks
    assert fused[0]["digest"] == serial[0]["digest"]


def test_samples_of_one_prompt_move_in_small_buckets_and_send_it_once(run):
    """Twenty prompt tokens are two full blocks; the four samples of an instance have them in common."""
    serial = run("all the same", 0, blocks=80, bucket_bytes=1, one_prompt=True)[0]
    fused = run("all the same", 16, blocks=80, bucket_bytes=1, one_prompt=True)[0]
    assert fused["digest"] == serial["digest"] and fused["recomputed"] == 0
    moves = [line.split() for line in fused["plan"].splitlines() if line.startswith("move")]
    pairs = {move[1].partition(":")[2] for move in moves}
    blocks = sum(-(-int(move[3]) // 8) for move in moves)
    assert len(moves) > len(pairs) and fused["bytes"] < blocks * fused["block_bytes"]
    known = sum(-(-int(move[3]) // 8) - 2 for move in moves)
    assert fused["bytes"] == known * fused["block_bytes"], "each destination has decoded the same prompt itself"


def test_pairs_are_ordered_in_rounds_of_different_partners():
    moves = tuple(Move(10 * s + d, s, d, "kv", 8) for d in (4, 5, 6) for s in (0, 1, 2))
    order = [f"{s}>{d}" for s, d in transfer_order(MigrationPlan((4, 5, 6), (0, 1, 2), moves, ()))]
    assert order == ["0>4", "1>5", "2>6", "0>5", "1>6", "2>4", "0>6", "1>4", "2>5"]


def test_tensor_parallel_instances_act_on_the_trigger_together(run):
    serial = run("two very long", 0, layout="d2t2p1", inference="d4t1p1")
    for inference in ("d4t1p1", "d2t2p1"):
        fused = run("two very long", 4, layout="d2t2p1", inference=inference, step_seconds=0.005)
        assert fused[0]["migrated"] >= 1
        if inference == "d4t1p1":
            assert fused[0]["digest"] == serial[0]["digest"]
        else:
            assert fused[0]["digest"] == run("two very long", 0, layout="d2t2p1", inference="d2t2p1")[0]["digest"]


def test_packs_keep_the_budget_and_lose_nobody():
    lengths = [5, 30, 2, 9, 9, 40, 1]
    packs = pack_by_tokens(lengths, 20)
    assert sorted(i for pack in packs for i in pack) == list(range(7))
    assert all(sum(lengths[i] for i in pack) <= 20 or len(pack) == 1 for pack in packs)
    assert pack_by_tokens([], 20) == []
