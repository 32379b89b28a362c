"""Samples move between ranks and tensor-parallel layouts: heads are re-cut, bits arrive unchanged, buckets are kept."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from testkit.gen_models import add_all, assert_near, engine_of, run_out, tiny_spec
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine, SamplingParams
from rlhfuse.gen.migration.kv_transfer import KVTransfer
from rlhfuse.gen.migration.peer_transfer import HeadPlan, receive_sequences, send_sequences
from rlhfuse.parallel.groups import new_group

SPEC = tiny_spec(kv_heads=4, qk_norm=True, head_dim=16)
PROMPTS = [list(range(20, 59))] * 4 + [[9, 10, 11], [12], [300, 299] * 9]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
STEPS, BLOCK = 7, 4
LAYOUTS = {"2 to 1": ((0, 1), (2,)), "1 to 2": ((0,), (1, 2)), "2 to 2": ((1, 0), (3, 2)), "1 to 1": ((3,), (0,))}


def test_the_plan_says_who_sends_which_heads():
    moves = (0, 4, 0, 1), (0, 5, 1, 2), (1, 6, 2, 3), (1, 7, 3, 4)
    assert HeadPlan.between((0, 1), (4, 5, 6, 7), 4).moves == moves
    assert HeadPlan.between((3, 2), (0,), 8).moves == ((3, 0, 0, 4), (2, 0, 4, 8))
    assert HeadPlan.between((0, 1), (3, 2), 2).moves == ((0, 3, 0, 1), (1, 2, 1, 2))
    with pytest.raises(InputError, match=r"kv_heads\(4\) is not a multiple of tp\(3\)"):
        HeadPlan.between((0, 1), (2, 3, 4), 4)
    with pytest.raises(InputError, match=r"ranks \[1\] are source and destination"):
        HeadPlan.between((0, 1), (1, 2), 4)


@examples(100)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_every_rank_gets_each_of_its_heads_once(a, b, more):
    heads = a * b * more
    plan = HeadPlan.between(range(a), range(a, a + b), heads)
    for rank in range(a, a + b):
        got = [head for _, mine in plan.moves_of(rank) for head in range(heads // b)[mine]]
        assert sorted(got) == list(range(heads // b))
    for rank in range(a):
        assert {h for _, mine in plan.moves_of(rank) for h in range(heads // a)[mine]} == set(range(heads // a))
    for (out, there), (same, here) in zip(
        [x for r in range(a) for x in plan.moves_of(r)],
        sorted([x for r in range(a, a + b) for x in plan.moves_of(r)], key=lambda x: plan.moves.index(x[0])),
    ):
        first = out.source * (heads // a) + there.start, (same.destination - a) * (heads // b) + here.start
        assert out == same and first == (out.first, out.first) and there.stop - there.start == out.last - out.first


def kv_of(engine: Engine) -> dict[int, torch.Tensor]:
    """Keys and values of each sample on this rank: [2, layers, tokens, G, D]."""
    found = {}
    for seq in engine.scheduler.running:
        blocks = engine._cache.read_blocks(seq.block_table)
        found[seq.sample_id] = blocks.transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, : seq.computed_tokens]
    return found


def hand_over(rank: int, sources, destinations, dtype: str, bucket_bytes: int, refuse: bool, already: int) -> dict:
    """One hand-over on this rank: keys and values before or after, what was sent, and the samples that end here."""
    groups = [new_group(ranks) for ranks in (sources, destinations)]
    side = 0 if rank in sources else 1 if rank in destinations else None
    plan = HeadPlan.between(sources, destinations, SPEC.kv_heads)
    told = {"rank": rank, "sent": 0, "error": None, "largest": 0}
    if side is not None:
        group = groups[side] if len((sources, destinations)[side]) > 1 else None
        sizes = dict(num_blocks=120, block_tokens=BLOCK, max_batched_tokens=32)
        engine = engine_of(SPEC, dtype=getattr(torch, dtype), tp_group=group, **sizes)
        if side == 0:
            source_side(engine, plan, rank, bucket_bytes, already, told)
        else:
            destination_side(engine, plan, rank, bucket_bytes, refuse, already, told)
        told["results"] = run_out(engine)
    dist.barrier()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return told


def source_side(engine: Engine, plan: HeadPlan, rank: int, bucket_bytes: int, already: int, told: dict) -> None:
    add_all(engine, PROMPTS, PARAMS, STEPS)
    told["kv"] = kv_of(engine)
    ids = [s.sample_id for s in engine.unfinished()]
    for some in [ids[:already], ids[already:]] if already else [ids]:
        try:
            with engine.export_sequences(some) as transfer:

                def read(numbers, heads, transfer=transfer):
                    kv = transfer.read(numbers, heads)
                    told["largest"] = max(told["largest"], kv.numel() * kv.element_size())
                    return kv

                told["blocks"] = transfer.manifest.num_blocks
                told["sent"] += send_sequences(
                    KVTransfer(transfer.manifest, read), plan, rank, bucket_bytes=bucket_bytes
                )
        except RuntimeError as error:
            told["error"] = str(error)


def destination_side(
    engine: Engine, plan: HeadPlan, rank: int, bucket_bytes: int, refuse: bool, already: int, told: dict
) -> None:
    if refuse:
        engine.add(2, [8, 8, 8], PARAMS)
    for _ in range(2 if already else 1):
        try:
            told["recomputed"] = receive_sequences(engine, plan, rank, bucket_bytes=bucket_bytes)
        except InputError as error:
            told["error"] = str(error)
    engine.scheduler.check_integrity()
    told["kv"] = kv_of(engine)


@pytest.fixture(scope="module")
def whole():
    return engine_of(SPEC, block_tokens=BLOCK).generate(PROMPTS, PARAMS)


def run(workers, layout, dtype="float32", bucket_bytes=64 << 20, refuse=False, already=0):
    sources, destinations = LAYOUTS[layout]
    told = workers.run(hand_over, sources, destinations, dtype, bucket_bytes, refuse, already)
    return [told[rank] for rank in sources], [told[rank] for rank in destinations]


def same_bits(sources, destinations) -> None:
    for sample in sources[0]["kv"]:
        before, after = (torch.cat([one["kv"][sample] for one in side], 3) for side in (sources, destinations))
        assert torch.equal(before, after), f"sample {sample}"


def unique_blocks(sources) -> int:
    """Samples 0 to 3 share 9 full blocks of their 39 prompt tokens; everything else is one's own."""
    tokens = {sample: kv.shape[2] for sample, kv in sources[0]["kv"].items()}
    assert len(tokens) == len(PROMPTS) and min(tokens[i] for i in range(4)) > 39
    return sum(-(-n // BLOCK) for n in tokens.values()) - 3 * 9


@pytest.mark.parametrize(
    "layout, bucket_bytes", [*((layout, 10_000) for layout in LAYOUTS), ("2 to 1", 1), ("1 to 2", 64 << 20)]
)
def test_bits_arrive_and_generation_goes_on(workers, whole, layout, bucket_bytes):
    sources, destinations = run(workers, layout, bucket_bytes=bucket_bytes)
    same_bits(sources, destinations)
    assert all(one["recomputed"] == [] and one["results"] == destinations[0]["results"] for one in destinations)
    assert all(one["results"] == [] and one["error"] is None for one in sources)
    results = destinations[0]["results"]
    assert_near(results, whole)
    if layout == "1 to 1":
        assert results == whole  # to the bit
    unique = unique_blocks(sources)
    block_bytes = BLOCK * SPEC.kv_bytes_per_token(4)
    assert {one["blocks"] for one in sources} == {unique}
    assert sum(one["sent"] for one in sources) == unique * block_bytes
    heads = max(len(sources), len(destinations))
    assert max(one["largest"] for one in sources) <= max(bucket_bytes / 2, block_bytes / heads)  # at least one block


def test_a_second_transfer_brings_only_what_is_not_known(workers, whole):
    """Two of the four samples of a prompt move first, so that their shared blocks wait there for the others."""
    sources, destinations = run(workers, "2 to 1", already=2)
    same_bits(sources, destinations)
    assert sum(one["sent"] for one in sources) == unique_blocks(sources) * BLOCK * SPEC.kv_bytes_per_token(4)
    assert [r.tokens for r in destinations[0]["results"]] == [r.tokens for r in whole]


def test_half_precision_moves_between_layouts(workers):
    sources, destinations = run(workers, "1 to 2", "bfloat16")
    same_bits(sources, destinations)
    assert sources[0]["sent"] == sources[0]["blocks"] * BLOCK * SPEC.kv_bytes_per_token(2)
    assert len(destinations[0]["results"]) == len(PROMPTS)


def test_refused_samples_stay_and_go_on(workers, whole):
    sources, destinations = run(workers, "2 to 2", refuse=True)
    for one in destinations:
        assert "sample 2 is already in the engine" in one["error"] and [r.sample_id for r in one["results"]] == [2]
    for one in sources:
        assert "not taken" in one["error"] and one["sent"] == 0
        assert [r.tokens for r in one["results"]] == [r.tokens for r in whole]
